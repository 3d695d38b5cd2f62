"""Dynamic few-shot learning without forgetting (Gidaris, Komodakis, CVPR 2018)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
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
    one_hot,
)
from torchemo.models.layers import kaiming_normal, zeros
from torchemo.models.trunk import feature_count

NOISE = 0.001
"""Deviation of the noise on the map of queries, which begins near the identity."""


@dataclass(frozen=True)
class DynamicFSOptions(HeadOptions):
    """Options of Dynamic FS."""

    scale: float = 10.0
    """Where the learned scale of the logits begins; a dense stage brings its own."""
    attention_scale: float = 10.0
    """Where the learned scale of the attention begins."""
    base_queries: int = 15
    """Further query images of base classes in every training task; 0 classifies those of the task alone."""
    freeze_trunk: bool = False
    """Leave the network as the dense stage has left it, with its stored normalisation statistics: so the
    paper and the preset."""

    def __post_init__(self) -> None:
        check_above_zero(scale=self.scale, attention_scale=self.attention_scale)
        refuse_below(0, self, "base_queries", where="learner")


@final
@dataclass(frozen=True)
class DynamicFS(DynamicFSOptions, Head):
    """Classify by cosine to weights that are generated from support features and those of base classes.

    With unit features ``z_i`` and unit weights ``u_b`` of the base classes, class k has the weight ``w_k =
    phi_avg o mean_i z_i + phi_att o mean_i sum_b a_ib u_b``, where ``a_i = softmax_b(gamma cos(A z_i + a_0,
    kappa_b))``. The logits are ``s cos(z, w_k)``.

    In training, classes of a task play novel ones: the attention leaves their base weights and keys out, and
    the loss asks for the right one of all base classes, with the generated weights in the places of these.
    Which they are is known to the loss alone. At test the attention sees all base classes.

    Choice: the scalar bias of the cosine classifier is left out, as it changes no answer. Further queries are
    images of any base class; the authors draw those of classes outside the task.
    """

    title: ClassVar[str] = "Dynamic FS"
    Options: ClassVar[type] = DynamicFSOptions

    features: int = 0
    """Length of a feature vector."""
    base: int = 0
    """Number of base classes."""

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "DynamicFS":
        """Make the head for a network's features and the base classes of these tasks."""
        if tasks.base_classes <= tasks.n_out:
            raise ConfigError(
                f"{cls.title} needs more base classes than a task has, got {tasks.base_classes}"
                f" and {tasks.n_out}.",
                hint="Use image sets with more classes in the training split, or lower data.n_way.",
            )
        size = feature_count(model)
        return cls(**vars(options), features=size, base=tasks.base_classes)

    @property
    def frozen_trunk(self) -> bool:
        """Whether episodes leave the network as it is."""
        return self.freeze_trunk

    @property
    def base_examples(self) -> int:
        """How many further examples of base classes each training task should bring."""
        return self.base_queries

    def init(self, generator: torch.Generator) -> Params:
        """Draw base weights and keys; the generator begins at the mean of support and attention."""
        f, device = self.features, generator.device
        shape = (self.base, f)
        noise = torch.randn(f, f, generator=generator, device=device)
        return {
            "base.weight": kaiming_normal(shape, generator),
            "key.weight": kaiming_normal(shape, generator),
            "query.weight": torch.eye(f, device=device) + NOISE * noise,
            "query.bias": zeros((f,), generator),
            "average": torch.ones(f, device=device),
            "attend": torch.ones(f, device=device),
            "attention_scale": torch.tensor(self.attention_scale, device=device),
            "scale": torch.tensor(self.scale, device=device),
        }

    def after_dense(self, classifier: Params) -> Params:
        """Take over the base weights of a dense classifier, and its scale if it is cosine."""
        weight = classifier["weight"]
        if weight.shape != (self.base, self.features):
            raise ConfigError(
                f"{self.title} has {self.base} base classes of {self.features} features, the dense"
                f" classifier has weights {list(weight.shape)}.",
                hint="Start from a dense run of the same data and network.",
            )
        taken = {"base.weight": weight}
        return taken | ({"scale": classifier["scale"]} if "scale" in classifier else {})

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Generate a weight for every class; all base classes are at hand."""
        weight = self._generated(params, z, y, n_way=n_way)
        # The loss generates the weights again, without the base classes of the task.
        return {"weight": weight, "support": z, "labels": one_hot(y, n_way, like=z)}

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Compare queries with the generated weights."""
        return _cosines(params, z, classifier["weight"])

    def class_losses(
        self, params: Params, classifier: Params, z: Features, y: Labels, *, base: BaseClasses
    ) -> TaskLosses:
        """Return the cross-entropy over all base classes, those of the task by their generated weights."""
        member = classifier["labels"]
        absent = one_hot(base.labels, self.base, like=z).sum(1).bool()
        labels, n_way = member.argmax(-1), member.shape[-1]
        own = self._generated(params, classifier["support"], labels, n_way=n_way, absent=absent)
        places = base.labels[..., None].expand(-1, -1, self.features)
        weight = params["base.weight"].scatter(1, places, own)
        target = base.labels.gather(1, y.long())
        if base.examples is not None:
            z = torch.cat([z, base.examples.x], dim=1)
            target = torch.cat([target, base.examples.y], dim=1)
        return cross_entropy(_cosines(params, z, weight), target)

    def _generated(
        self,
        params: Params,
        z: Features,
        y: Labels,
        *,
        n_way: int,
        absent: Bool[Tensor, "task base"] | None = None,
    ) -> Float[Tensor, "task way f"]:
        """Generate the weights of the classes; ``absent`` base classes get no attention."""
        z = F.normalize(z, dim=-1)
        weight, bias = params["query.weight"], params["query.bias"]
        asked = F.normalize(torch.baddbmm(bias.unsqueeze(1), z, weight.transpose(1, 2)), dim=-1)
        keys = F.normalize(params["key.weight"], dim=-1)
        scores = params["attention_scale"][:, None, None] * asked @ keys.transpose(1, 2)
        if absent is not None:
            scores = scores.masked_fill(absent.unsqueeze(1), -torch.inf)
        attended = scores.softmax(-1) @ F.normalize(params["base.weight"], dim=-1)
        average, attend = params["average"].unsqueeze(1), params["attend"].unsqueeze(1)
        means = class_means(torch.cat([z, attended], dim=-1), y, n_way=n_way)
        of_support, of_base = means.chunk(2, dim=-1)
        return average * of_support + attend * of_base


def _cosines(params: Params, z: Features, weight: Float[Tensor, "task way f"]) -> Logits:
    unit = F.normalize(z, dim=-1) @ F.normalize(weight, dim=-1).transpose(1, 2)
    return params["scale"][:, None, None] * unit
