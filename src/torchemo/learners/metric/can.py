"""CAN: Cross Attention Network for few-shot classification (Hou, Chang, Ma, Shan, Chen, NeurIPS 2019)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.config.options import refuse_below
from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.prototypes import class_means
from torchemo.core.types import BaseClasses, Model, Params, TaskShape
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
from torchemo.models.trunk import feature_map


@dataclass(frozen=True)
class CANOptions(HeadOptions):
    """Options of CAN; the defaults are the paper's."""

    scale: float = 7.0
    """What multiplies cosines."""
    temperature: float = 0.025
    """What divides the attention before its softmax."""
    dense_weight: float = 0.0
    """Weight of the loss over all base classes beside that of the task: 2 in the paper; 0 leaves it out."""


class _Pairs(NamedTuple):
    """Every query beside every class, each map weighted by what corresponds to it in the other.

    Attributes:
        classes: Pooled map of the class, as seen by the query.
        queries: Pooled map of the query, as seen by the class.
    """

    classes: Float[Tensor, "task q way c"]
    queries: Float[Tensor, "task q way c"]


@final
@dataclass(frozen=True)
class CAN(CANOptions, Head):
    """Classify a query by cosine, after both maps have been weighted by where they correspond.

    With ``R_ij = cos(P_i, Q_j)`` between places of a class's mean map P and of a query's map Q, a small
    network of ``mean_i R_ij`` gives weights w_j, and P is multiplied by ``softmax_i(mean_j w_j R_ij / tau) +
    1`` (Eq. 2 to 5 of the paper); Q likewise with R transposed and the same network. The answer is the
    cosine of the pooled maps. The loss asks every place of the query for the class (Eq. 7).

    A second loss classifies all base classes: a linear layer asks every place of a query's map, weighed for
    its own class, which base class it shows (Eq. 8).

    Choices: the small network normalises nothing, so that the answer to a query does not depend on others;
    its hidden layer has a sixth of the places.
    """

    title: ClassVar[str] = "CAN"
    Options: ClassVar[type] = CANOptions

    map: tuple[int, int, int] = (1, 1, 1)
    """Channels, height and width of the network's last map."""
    base: int = 0
    """Number of base classes; 0 if none are classified."""

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "CAN":
        """Make the head for a network's maps."""
        if options.dense_weight and not tasks.base_classes:
            raise ConfigError(
                f"learner.dense_weight is {options.dense_weight}, and these tasks have no base classes.",
                hint="Use image sets, or set learner.dense_weight to 0.",
            )
        base = tasks.base_classes if options.dense_weight else 0
        return cls(**vars(options), map=feature_map(model), base=base)

    def __post_init__(self) -> None:
        check_above_zero(scale=self.scale, temperature=self.temperature)
        refuse_below(0, self, "dense_weight", where="learner")

    @property
    def _places(self) -> int:
        return self.map[1] * self.map[2]

    def init(self, generator: torch.Generator) -> Params:
        """Draw the small network; a map of one place has nothing to attend to."""
        m, drawn = self._places, dict[str, Tensor]()
        hidden = max(m // 6, 1)
        if m > 1:
            drawn |= {
                "hidden.weight": glorot_uniform((hidden, m), generator),
                "hidden.bias": zeros((hidden,), generator),
                "weigh.weight": glorot_uniform((m, hidden), generator),
                "weigh.bias": zeros((m,), generator),
            }
        if self.base:
            drawn["dense.weight"] = glorot_uniform((self.base, self.map[0]), generator)
            drawn["dense.bias"] = zeros((self.base,), generator)
        return drawn

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Average the maps of each class."""
        return {"maps": self._as_maps(class_means(z, y, n_way=n_way))}

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Compare the pooled maps of every pair."""
        pairs = self._pairs(params, classifier, self._as_maps(z))
        return self.scale * F.cosine_similarity(pairs.queries, pairs.classes, dim=-1)

    def losses(self, params: Params, classifier: Params, z: Features, y: Labels) -> TaskLosses:
        """Return the cross-entropy at every place of the queries, averaged."""
        maps = self._as_maps(z)
        classes = F.normalize(self._pairs(params, classifier, maps).classes, dim=-1)
        # A place's weight is one positive number for all its channels, which a cosine does not see.
        cosines = torch.einsum("bqcj,bqnc->bqnj", F.normalize(maps, dim=2), classes)
        log_p = (self.scale * cosines).log_softmax(2)
        right = y.long()[:, :, None, None].expand(-1, -1, 1, log_p.shape[3])
        return -log_p.gather(2, right).mean((1, 2, 3))

    def class_losses(
        self, params: Params, classifier: Params, z: Features, y: Labels, *, base: BaseClasses
    ) -> TaskLosses:
        """Return the loss of the task and, weighed, that of base classes at every place of the queries."""
        losses = self.losses(params, classifier, z, y)
        if not self.base:
            return losses
        maps, label = self._as_maps(z), y.long()
        own = classifier["maps"].gather(1, label[..., None, None].expand(maps.shape))
        unit = [F.normalize(one, dim=2) for one in (maps, own)]
        alike = torch.einsum("bqcj,bqci->bqji", *unit).unsqueeze(2)
        weighed = maps * self._attention(params, alike)
        places = weighed.transpose(2, 3).flatten(1, 2)
        target = base.labels.gather(1, label).repeat_interleave(self._places, dim=1)
        dense = cross_entropy(task_linear(params, places, layer="dense"), target)
        return losses + self.dense_weight * dense

    def _as_maps(self, z: Features) -> Float[Tensor, "task n c place"]:
        return z.view(*z.shape[:2], self.map[0], self._places)

    def _pairs(
        self, params: Params, classifier: Params, queries: Float[Tensor, "task q c place"]
    ) -> _Pairs:
        classes = classifier["maps"]
        unit = [F.normalize(maps, dim=2) for maps in (classes, queries)]
        alike = torch.einsum("bnci,bqcj->bqnij", *unit)
        of_class = self._attention(params, alike)
        of_query = self._attention(params, alike.transpose(3, 4))
        m = self._places
        return _Pairs(
            torch.einsum("bnci,bqni->bqnc", classes, of_class) / m,
            torch.einsum("bqcj,bqnj->bqnc", queries, of_query) / m,
        )

    def _attention(
        self, params: Params, alike: Float[Tensor, "task q way i j"]
    ) -> Float[Tensor, "task q way i"]:
        """Weigh the places i of one map by how they are like the places j of the other."""
        if self._places == 1:
            return 2 * torch.ones_like(alike[..., 0])
        met = alike.mean(3)
        hidden = task_linear(params, met.flatten(1, 2), layer="hidden").relu()
        weights = task_linear(params, hidden, layer="weigh").view(met.shape)
        scores = (alike * weights.unsqueeze(3)).mean(4)
        return (scores / self.temperature).softmax(-1) + 1
