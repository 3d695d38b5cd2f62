"""TapNet: few-shot learning with task-adaptive projection (Yoon, Seo, Moon, ICML 2019)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final, get_args

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.prototypes import class_means
from torchemo.core.types import Model, Params, TaskShape
from torchemo.learners.head import Features, HeadOptions, Labels, LinearHead
from torchemo.learners.learner import Traits
from torchemo.models.inputs import check_choice
from torchemo.models.layers import kaiming_normal
from torchemo.models.trunk import feature_count

_TINY = 1e-6
"""What the authors add to a norm before they divide by it."""


@dataclass(frozen=True)
class TapNetOptions(HeadOptions):
    """Options of TapNet."""

    references: int | None = None
    """Reference vectors: the classes of a training task. None: as many as the tasks have."""
    assign: Literal["greedy", "hungarian"] = "greedy"
    """How fewer classes than references choose theirs: one class after the other (the authors), or the best
    choice for all at once, which does not depend on the order of the labels."""


@final
@dataclass(frozen=True)
class TapNet(TapNetOptions, LinearHead):
    """Classify a query by its distance to learned references, in a subspace made for the task.

    With class means c_n and references phi_n, ``phi'_n = N phi_n - sum_l phi_l``, both taken to unit length,
    and ``e_n = phi'_n - c_n``. M is a basis of what is orthogonal to all e_n, so that means and references
    agree in it. The logits are ``-|M^T (z - phi_n)|^2 + 2 b_n``. Up to a number per query they are linear:
    ``W_n = 2 M M^T phi_n``, ``b'_n = 2 b_n - |M^T phi_n|^2`` with ``M M^T = I - Q Q^T`` from ``e^T = Q R``.

    No gradient passes through M, as in the authors' code. Support features therefore get none.
    """

    title: ClassVar[str] = "TapNet"
    Options: ClassVar[type] = TapNetOptions
    traits: ClassVar[Traits] = LinearHead.traits._replace(
        exact_meta_gradient=False, label_equivariant=False
    )
    learns_to_compare: ClassVar[bool] = True

    features: int = 0
    """Length of a feature vector."""

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "TapNet":
        """Make the head for a network's features."""
        given = vars(options) | {"references": options.references or tasks.n_out}
        return cls(**given, features=feature_count(model))

    def __post_init__(self) -> None:
        check_choice("assign", self.assign, get_args(Literal["greedy", "hungarian"]))
        most = self.most_classes or 0
        if most < 2:
            raise ConfigError(f"learner.references should be 2 or more, got {self.references}.")
        if self.features <= most:
            raise ConfigError(
                f"TapNet needs more features than references, got {self.features} and {most}.",
                hint="Use a network with more filters, or fewer learner.references.",
            )

    @property
    def most_classes(self) -> int | None:
        """Every class needs a reference of its own."""
        return self.references

    def init(self, generator: torch.Generator) -> Params:
        """Draw the references; their biases begin at 0."""
        shape = (self.most_classes or 0, self.features)
        reference = kaiming_normal(shape, generator)
        return {"reference": reference, "bias": reference.new_zeros(shape[:1])}

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Find the subspace in which class means and references agree."""
        means = class_means(z, y, n_way=n_way).detach()
        reference, bias = params["reference"], params["bias"]
        if n_way < reference.shape[1]:
            chosen = self._chosen(means, reference, bias)
            reference = reference.gather(1, chosen[..., None].expand(-1, -1, reference.shape[2]))
            bias = bias.gather(1, chosen)
        basis = _error_basis(means, reference.detach())
        inside = reference - (reference @ basis) @ basis.transpose(1, 2)
        return {"weight": 2 * inside, "bias": 2 * bias - (reference * inside).sum(-1)}

    @torch.no_grad()
    def _chosen(self, means: Tensor, reference: Tensor, bias: Tensor) -> Int[Tensor, "task way"]:
        """Give every class a reference of its own, near its mean."""
        fit = 2 * means @ reference.transpose(1, 2)
        fit = fit + (2 * bias - reference.square().sum(-1)).unsqueeze(1)
        if self.assign == "hungarian":
            each = [linear_sum_assignment(-one)[1] for one in fit.double().cpu().numpy()]
            return torch.stack([torch.from_numpy(one) for one in each]).to(means.device)
        chosen = []
        for label in range(means.shape[1]):
            best = fit[:, label].argmax(1, keepdim=True)
            chosen.append(best)
            # A reference that is taken is not chosen again.
            fit = fit.scatter(2, best.unsqueeze(1).expand(-1, fit.shape[1], 1), -torch.inf)
        return torch.cat(chosen, dim=1)


def _error_basis(
    means: Float[Tensor, "task way f"], reference: Float[Tensor, "task way f"]
) -> Float[Tensor, "task f way"]:
    """Return an orthonormal basis of the errors e_n; columns that span nothing are zero."""
    apart: Tensor = reference.shape[1] * reference - reference.sum(1, keepdim=True)
    error = _unit(apart) - _unit(means)
    basis, upper = torch.linalg.qr(error.transpose(1, 2))
    # An error that is zero, or depends on the others, must not take a direction away.
    spans = upper.diagonal(dim1=1, dim2=2).abs() > 1e-5 * error.norm(dim=-1).amax(1, True) + 1e-12
    kept: Tensor = basis * spans.unsqueeze(1)
    return kept


def _unit(vectors: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / (length + _TINY)
