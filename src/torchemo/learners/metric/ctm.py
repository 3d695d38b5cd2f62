"""CTM: category traversal module (Li, Eigen, Dodge, Zeiler, Wang, CVPR 2019), our reading."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.prototypes import class_means
from torchemo.core.types import Model, Params, TaskShape
from torchemo.learners.head import (
    Features,
    Head,
    HeadOptions,
    Labels,
    Logits,
    check_above_zero,
    one_hot,
)
from torchemo.models.inputs import check_positive
from torchemo.models.layers import kaiming_normal, task_conv, to_trunk, zeros
from torchemo.models.trunk import feature_map

SLOPE = 0.1
"""Slope of the activations below zero: without one, small blocks may be dead from the start."""
_TINY = 1e-12
"""Added to squared distances: a norm has no slope at zero."""
Maps = Float[Tensor, "task n c h w"]


@dataclass(frozen=True)
class CTMOptions(HeadOptions):
    """Options of CTM."""

    filters: int = 40
    """Channels of the masked maps; 40 in the authors' settings for a small network."""
    blocks: int = 1
    """Residual blocks of concentrator, projector and reshaper (published: 4)."""
    scale: float = 10.0
    """Where the learned scale of the distances begins. The paper has none; masked maps are small at first."""


@final
@dataclass(frozen=True)
class CTM(CTMOptions, Head):
    """Classify by distances of maps that a mask for the whole task has multiplied.

    The concentrator takes the mean map of a class's support examples. The projector reads those of all
    classes, side by side in the channels, and its softmax over channels is the mask p, one for all examples
    of the task. The reshaper r makes maps of the same size. With ``d = |r(x) o p - r(x_i) o p|`` the logit of
    a class is minus the mean d over its support examples, times a learned scale.

    Our reading: the authors' code multiplies matrices where the paper multiplies elements, and does not run
    as published. We multiply elements, take the mean over support examples instead of the sum, and normalise
    nothing inside, so that no example depends on the others. Classes that a task lacks are maps of zeros.
    """

    title: ClassVar[str] = "CTM"
    Options: ClassVar[type] = CTMOptions
    # The projector has weights of its own for every class number.
    traits: ClassVar[Any] = Head.traits._replace(label_equivariant=False)

    map: tuple[int, int, int] = (1, 1, 1)
    """Channels, height and width of the network's last map."""
    classes: int = 2
    """Classes of a training task."""

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "CTM":
        """Make the head for a network's maps and as many classes."""
        return cls(**vars(options), map=feature_map(model), classes=tasks.n_out)

    def __post_init__(self) -> None:
        check_positive(filters=self.filters, blocks=self.blocks)
        check_above_zero(scale=self.scale)

    @property
    def most_classes(self) -> int | None:
        """The projector reads no more classes than in training."""
        return self.classes

    def init(self, generator: torch.Generator) -> Params:
        """Draw the three networks."""
        c, filters = self.map[0], self.filters
        inside = {"concentrate": c, "project": self.classes * filters, "reshape": c}
        drawn: Params = {"scale": torch.tensor(self.scale, device=generator.device)}
        for part, first in inside.items():
            for i in range(self.blocks):
                drawn |= _block(f"{part}{i}", first if i == 0 else filters, filters, generator)
        return drawn

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Find the mask of the task, and the masked support maps with their classes."""
        maps = z.view(*z.shape[:2], *self.map)
        concentrated = self._sent(params, maps, "concentrate")
        means = class_means(concentrated.flatten(2), y, n_way=n_way)
        beside = F.pad(means, (0, 0, 0, self.classes - n_way)).reshape(len(z), 1, -1, *self.map[1:])
        mask = self._sent(params, beside, "project").softmax(2)
        masked = self._sent(params, maps, "reshape") * mask
        member = one_hot(y, n_way, like=z)
        return {"mask": mask, "support": masked.flatten(2), "share": member / member.sum(1, True)}

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Measure distances of masked maps."""
        maps = z.view(*z.shape[:2], *self.map)
        masked = (self._sent(params, maps, "reshape") * classifier["mask"]).flatten(2)
        apart = masked.unsqueeze(2) - classifier["support"].unsqueeze(1)
        distances = (apart.square().sum(-1) + _TINY).sqrt()
        return -params["scale"][:, None, None] * distances @ classifier["share"]

    def _sent(self, params: Params, maps: Maps, part: str) -> Maps:
        """Send maps through the blocks of one of the three networks."""
        tasks, n = maps.shape[:2]
        trunk = to_trunk(maps)
        for i in range(self.blocks):
            name = f"{part}{i}"
            inner = F.leaky_relu(task_conv(params, trunk, layer=f"{name}.down"), SLOPE)
            inner = F.leaky_relu(task_conv(params, inner, layer=f"{name}.conv"), SLOPE)
            inner = task_conv(params, inner, layer=f"{name}.up")
            trunk = F.leaky_relu(inner + task_conv(params, trunk, layer=f"{name}.past"), SLOPE)
        return trunk.view(n, tasks, self.filters, *self.map[1:]).transpose(0, 1)


def _block(name: str, inside: int, filters: int, generator: torch.Generator) -> Params:
    """Draw a residual block whose inner layers have half of the channels."""
    half = max(filters // 2, 1)
    shapes = {
        "down": (half, inside, 1, 1),
        "conv": (half, half, 3, 3),
        "up": (filters, half, 1, 1),
        "past": (filters, inside, 1, 1),
    }
    drawn = {f"{name}.{n}.weight": kaiming_normal(s, generator) for n, s in shapes.items()}
    return drawn | {f"{name}.{n}.bias": zeros(s[:1], generator) for n, s in shapes.items()}
