"""TADAM: task dependent adaptive metric (Oreshkin, Rodriguez, Lacoste, NeurIPS 2018)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.config.options import refuse_below
from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.prototypes import class_means
from torchemo.core.types import Model, Params, TaskShape
from torchemo.learners.head import (
    Features,
    Head,
    HeadOptions,
    Labels,
    Logits,
    TaskLosses,
    check_above_zero,
)
from torchemo.models.layers import glorot_uniform, task_linear, zeros
from torchemo.models.trunk import feature_count

_TINY = 1e-12
"""Added to squared distances: a norm has no slope at zero."""
_PARTS = ("gain", "offset")
"""The two networks of a layer, h and g of the paper."""


@dataclass(frozen=True)
class TADAMOptions(HeadOptions):
    """Options of TADAM; the defaults are those of the authors' code."""

    scale: float = 7.5
    """alpha, what multiplies distances; the authors choose it on validation tasks and do not learn it."""
    distance: Literal["euclidean", "cosine"] = "euclidean"
    """Distance to class means, or squared distance of unit vectors, which is two minus twice the cosine."""
    penalty: float = 0.01
    """Weight of the squared multipliers of the conditioning."""

    def __post_init__(self) -> None:
        check_above_zero(scale=self.scale)
        refuse_below(0, self, "penalty", where="learner")
        if self.distance not in ("euclidean", "cosine"):
            raise ConfigError(
                f"learner.distance should be euclidean or cosine, got '{self.distance}'."
            )


@final
@dataclass(frozen=True)
class TADAM(TADAMOptions, Head):
    """Classify by a scaled distance to class means, with features that depend on the task.

    A first pass over the support set gives the task's code, the mean of its class means. For every
    normalisation layer two small networks map the code to a gain h and an offset g for each channel. A second
    pass multiplies what the layer puts out by ``1 + gamma_0 h`` and adds ``beta_0 g`` (FiLM), and classes and
    queries are embedded so. The logits are ``-alpha |z - p_k|``.

    The multipliers gamma_0 and beta_0 of a layer begin at 0, which is ProtoNet with a scale, and their
    squares are penalised. Conditioning trains well only beside dense classification (``train.dense.share``).

    Choice: gain and offset are folded into the layer's scale and shift. Layers of shortcuts are left alone,
    as in the authors' code. A network that normalises nothing has nothing to condition.
    """

    title: ClassVar[str] = "TADAM"
    Options: ClassVar[type] = TADAMOptions

    features: int = 0
    """Length of a feature vector."""
    layers: tuple[tuple[str, int], ...] = ()
    """Normalisation layers that are conditioned, with their channels."""

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "TADAM":
        """Make the head for a network's features and normalisation layers."""
        theta = model.init(torch.Generator())
        shifts = [n for n in model.norm if n.endswith(".shift") and "shortcut" not in n]
        layers = tuple((n.removesuffix(".shift"), theta[n].shape[0]) for n in shifts)
        if any(f"{layer}.scale" not in theta for layer, _ in layers):
            raise ConfigError(
                "TADAM conditions scales and shifts, and this network's normalisation has no scales.",
                hint="Use a network whose normalisation learns both.",
            )
        if layers and options.bn_over == "batch":
            raise ConfigError(
                "TADAM has a network of its own for every task, so that tasks cannot share one pass.",
                hint="Set learner.bn_over = task.",
            )
        return cls(**vars(options), features=feature_count(model), layers=layers)

    @property
    def conditions(self) -> bool:
        """Whether the support set is embedded a second time, by the network of its task."""
        return bool(self.layers)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the small networks; their multipliers begin at 0."""
        drawn: Params = {}
        for layer, channels in self.layers:
            for part in _PARTS:
                drawn[f"{layer}.{part}"] = zeros((1,), generator)
                for number, inside in enumerate((self.features, channels, channels), start=1):
                    name = f"{layer}.{part}{number}"
                    drawn[f"{name}.weight"] = glorot_uniform((channels, inside), generator)
                    drawn[f"{name}.bias"] = zeros((channels,), generator)
        return drawn

    def conditioned(
        self, params: Params, theta: Params, z: Features, y: Labels, *, n_way: int
    ) -> Params:
        """Return the scales and shifts of the task whose support features are ``z``."""
        code = class_means(z, y, n_way=n_way).mean(1, keepdim=True)
        own: Params = {}
        for layer, _ in self.layers:
            gain, offset = (
                params[f"{layer}.{part}"] * self._mapped(params, code, f"{layer}.{part}")
                for part in _PARTS
            )
            own[f"{layer}.scale"] = (1 + gain) * theta[f"{layer}.scale"]
            own[f"{layer}.shift"] = (1 + gain) * theta[f"{layer}.shift"] + offset
        return own

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Average the features of each class."""
        return {"means": class_means(self._seen(z), y, n_way=n_way)}

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Measure distances to the means."""
        means, z = classifier["means"], self._seen(z)
        if self.distance == "cosine":
            means = F.normalize(means, dim=-1)
        squared = (z.unsqueeze(2) - means.unsqueeze(1)).square().sum(-1)
        return -self.scale * (squared if self.distance == "cosine" else (squared + _TINY).sqrt())

    def losses(self, params: Params, classifier: Params, z: Features, y: Labels) -> TaskLosses:
        """Return the query loss, and half the penalty times the squared multipliers."""
        losses = cross_entropy(self.logits(params, classifier, z), y)
        for layer, _ in self.layers:
            for part in _PARTS:
                losses = losses + self.penalty / 2 * params[f"{layer}.{part}"].square().sum(1)
        return losses

    def _seen(self, z: Tensor) -> Tensor:
        return F.normalize(z, dim=-1) if self.distance == "cosine" else z

    def _mapped(
        self, params: Params, code: Float[Tensor, "task 1 f"], name: str
    ) -> Float[Tensor, "task channel"]:
        """Apply three linear layers, with a connection past the second and the third."""
        first = F.silu(task_linear(params, code, layer=f"{name}1"))
        second = F.silu(task_linear(params, first, layer=f"{name}2"))
        return (first + task_linear(params, second, layer=f"{name}3")).squeeze(1)
