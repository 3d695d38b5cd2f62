"""MetaOptNet with its support vector head (Lee, Maji, Ravichandran, Soatto, CVPR 2019).

The paper is Meta-Learning with Differentiable Convex Optimization.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchemo.core.types import Params
from torchemo.learners.head import Features, Labels, check_above_zero, one_hot
from torchemo.learners.metric.ridge import ConvexHead, ConvexOptions, scaled

ROUNDS, STEPS = 80, 25
"""At most so many rounds of so many projected steps; each round ends with a check of optimality."""
Shares: TypeAlias = Float[Tensor, "task n way"]
Chosen: TypeAlias = Bool[Tensor, "task n way"]
Gram: TypeAlias = Float[Tensor, "task n n"]
TOLERANCE = 1e-9
"""Largest violation of the optimality conditions that counts as none."""


@dataclass(frozen=True)
class SVMOptions(ConvexOptions):
    """Options of MetaOptNet's support vector head; the penalty is the paper's."""

    penalty: float = 0.1
    """C, the price of a violated margin."""


@final
@dataclass(frozen=True)
class MetaOptNetSVM(SVMOptions, ConvexHead):
    """Classify by the multi-class support vector machine of Crammer and Singer, solved exactly.

    The primal problem is ``min 1/2 sum_k |w_k|^2 + C sum_i xi_i`` with margins
    ``w_y_i z_i - w_k z_i >= 1 - [k = y_i] - xi_i``. Its dual has ``W = alpha^T Z``, and with
    ``alpha = C (Y - P)`` its constraints say that each row of P is a probability vector. Accelerated
    projected steps find which entries of P are above zero. One linear system in these entries then gives P,
    and autograd through it is the exact gradient of the optimum. Both work in float64.

    Choice: as in the authors' code, the identity is added to Z Z^T, as if every example had one more feature
    of its own. The code stops its solver after 3 iterations at test; this one goes to the optimum.
    """

    title: ClassVar[str] = "MetaOptNet-SVM"
    Options: ClassVar[type] = SVMOptions

    def __post_init__(self) -> None:
        check_above_zero(penalty=self.penalty)
        super().__post_init__()

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Solve the dual problem; the gradient is that of the optimum."""
        wide = z.double()
        alpha = dual_solution(wide, one_hot(y, n_way, like=wide), penalty=self.penalty)
        return scaled(params, (alpha.transpose(1, 2) @ wide).to(z.dtype))


def dual_solution(z: Features, target: Shares, *, penalty: float) -> Shares:
    """Return the optimal alpha for features z and one-hot labels."""
    identity = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    gram = penalty * (z @ z.transpose(1, 2) + identity)
    with torch.no_grad():
        positive = find_positive(gram, target, penalty=penalty)
    p, _ = solve_positive(gram, target, positive)
    return penalty * (target - p)


def find_positive(gram: Gram, target: Shares, *, penalty: float) -> Chosen:
    """Find which entries of the optimal P are above zero, by accelerated projected gradient steps.

    Args:
        gram: ``C (Z Z^T + I)``.
        target: One-hot labels Y.
        penalty: C.
    """
    # Row sums bound the largest eigenvalue; the identity makes the smallest at least C.
    largest = gram.abs().sum(-1).amax(-1)[:, None, None]
    ratio = (penalty / largest).sqrt()
    momentum = (1 - ratio) / (1 + ratio)
    p = ahead = target
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            before, p = p, project_simplex(ahead - slope(gram, target, ahead) / largest)
            ahead = p + momentum * (p - before)
        if is_optimal(gram, target, p > 0):
            break
    return p > 0


def slope(gram: Gram, target: Shares, p: Tensor) -> Shares:
    """Return the derivative of the dual objective in P, divided by C."""
    return target - gram @ (target - p)


def solve_positive(
    gram: Gram, target: Shares, positive: Chosen
) -> tuple[Shares, Float[Tensor, "task n 1"]]:
    """Minimise over P with rows that sum to one and zeros where it is not positive.

    Returns:
        P, and the price of each row's sum: the slope at its positive entries is minus that.
    """
    n, n_way = target.shape[1:]
    free = positive.transpose(1, 2).to(
        gram.dtype
    )  # [B, N, n]: one block of examples for each class
    blocks = gram.unsqueeze(1) * free.unsqueeze(-1) * free.unsqueeze(-2)
    blocks = blocks + torch.diag_embed(1 - free)
    size = n * n_way
    matrix = gram.new_zeros(len(gram), size + n, size + n)
    for k in range(n_way):
        matrix[:, k * n : (k + 1) * n, k * n : (k + 1) * n] = blocks[:, k]
    sums = torch.diag_embed(free).flatten(1, 2)
    matrix[:, :size, size:], matrix[:, size:, :size] = sums, sums.transpose(1, 2)
    right = (gram @ target - target).transpose(1, 2) * free
    right = torch.cat([right.flatten(1), right.new_ones(len(gram), n)], 1)
    found = torch.linalg.solve(matrix, right)
    p = found[:, :size].view(-1, n_way, n).transpose(1, 2)
    return p, found[:, size:].unsqueeze(-1)


def is_optimal(gram: Gram, target: Shares, positive: Chosen) -> bool:
    """Tell whether these positive entries are those of the optimum, in every task that is finite."""
    p, price = solve_positive(gram, target, positive)
    reduced = slope(gram, target, p) + price
    violation = torch.maximum(-p, torch.where(positive, -torch.inf, -reduced))
    return not bool((violation > TOLERANCE).any())


def project_simplex(p: Shares) -> Shares:
    """Return the nearest probability vector to each row."""
    ordered = p.sort(dim=-1, descending=True).values
    counts = torch.arange(1, p.shape[-1] + 1, device=p.device, dtype=p.dtype)
    shifts = (ordered.cumsum(-1) - 1) / counts
    last = (ordered > shifts).sum(-1, keepdim=True).clamp(min=1) - 1
    return (p - shifts.gather(-1, last)).clamp(min=0)
