"""Convergence of gradient steps that reuse stored gradients: the paper's Eq. (11)-(20), checked.

Setting: one objective f, mu-strongly convex and L-smooth; Delta = theta - theta*; stochastic
gradients g_t = R_t Delta_t + eps_t with eigenvalues of the mean Hessian R_t in [mu, L] (Eq. 11, 14)
and independent noise, E||eps||^2 <= sigma^2; and steps

    theta_{t+1} = theta_t - alpha sum_{s=0}^{S-1} w_s g_{t-s},    0 <= w_s <= 1    (Eq. 13, 15).

Stacked as x_t = [Delta_t; ...; Delta_{t-S+1}] it reads x_{t+1} = A_t x_t + noise (Eq. 16).

Where the paper is wrong:

- Its condition, lambda_max < 1 for the spectral *norm* of A (Eq. 12, 18-20), cannot hold for
  S >= 2: the first column of A alone has norm sqrt((1 - alpha w_0 tau)^2 + 1) >= 1, and a smaller
  alpha makes it worse. What is below 1 for small alpha is the spectral *radius*.
- "Converges whatever is selected" is false: w = 1/5 five times with alpha tau = 1 diverges, where
  plain gradient descent solves the problem in one step; w = 0 makes no progress.
- eps_{t-s} drives S consecutive steps, so the noise is correlated with x_t and the cross term
  dropped on the way to Eq. (19) does not vanish: the floor is higher (`stationary_variance`).
- Gradients recalled from *other* tasks do not average to that of f: they displace the fixed point
  (`recall_fixed_point`).
- Slips: the last entry on the left of Eq. (16) should be Delta_{t-S+2} and its noise sum should end
  at S - 1; the sum over past noise should end at t, not S; ||Delta_1||^2 should be ||x_1||^2;
  ||A x||^2 is at most, not equal to, ||A||^2 ||x||^2; the bound on f lacks its expectation; R Delta
  is written Delta times R; the theorem takes the root of the largest singular value of A where the
  appendix, rightly, takes the root of the largest eigenvalue of A^T A.

Our replacement, for constant weights and a quadratic f: `lyapunov_bound`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from jaxtyping import Float
from scipy.linalg import solve_discrete_lyapunov

from torchemo.core.errors import ConfigError, ShapeError

Weights: TypeAlias = Sequence[float] | Float[np.ndarray, " S"]
"""w_0 .. w_{S-1} of Eq. (15), newest gradient first; `mean` over m recalled has S = m + 1."""

GRID_POINTS = 257

# An eigenvalue that is exactly 1 (w = 0, say) must not pass for a contraction by rounding.
CONTRACTION = 1 - 1e-12


def block_companion(
    weights: Weights, alpha: float, *, curvatures: Float[np.ndarray, "S d d"]
) -> Float[np.ndarray, "Sd Sd"]:
    """Build A_t of Eq. (16), the matrix that carries x_t to x_{t+1}.

    Its first block row is (I - alpha w_0 R_t, -alpha w_1 R_{t-1}, ..., -alpha w_{S-1} R_{t-S+1});
    identity blocks stand below the diagonal.
    """
    w = _checked_weights(weights)
    if not 0 < alpha < math.inf:
        raise ConfigError(f"the step size alpha should be positive and finite, got {alpha}.")
    if len(curvatures) != len(w):
        raise ShapeError(f"expected one curvature per weight ({len(w)}), got {len(curvatures)}.")
    if not np.allclose(curvatures, curvatures.transpose(0, 2, 1)):
        raise ConfigError("curvature matrices should be symmetric, got at least one that is not.")
    dim = curvatures.shape[1]
    matrix = np.eye(len(w) * dim, k=-dim)
    matrix[:dim] = np.concatenate(list(-alpha * w[:, None, None] * curvatures), axis=1)
    matrix[:dim, :dim] += np.eye(dim)
    return matrix


def companion(
    weights: Weights, alpha: float, *, curvature: float | Float[np.ndarray, " S"]
) -> Float[np.ndarray, "S S"]:
    """Build the scalar companion matrix of Eq. (18): R becomes a number tau in [mu, L].

    Example:
        >>> companion([0.5, 0.5], 0.1, curvature=1.0).tolist()
        [[0.95, -0.05], [1.0, 0.0]]
    """
    tau = np.broadcast_to(np.asarray(curvature, dtype=np.float64), len(weights))
    return block_companion(weights, alpha, curvatures=tau[:, None, None])


def spectral_norm(matrix: Float[np.ndarray, "*n S S"]) -> Float[np.ndarray, "*n"]:
    """Return the paper's lambda_t: the root of the largest eigenvalue of A^T A (Eq. 18)."""
    return np.asarray(np.linalg.norm(matrix, ord=2, axis=(-2, -1)))


def spectral_radius(matrix: Float[np.ndarray, "*n S S"]) -> Float[np.ndarray, "*n"]:
    """Return the largest modulus of an eigenvalue: the factor per step in the long run."""
    return np.asarray(np.abs(np.linalg.eigvals(matrix)).max(axis=-1))


def curvature_grid(
    mu: float, L: float, *, points: int = GRID_POINTS
) -> Float[np.ndarray, " points"]:
    """Return evenly spaced curvatures from mu to L, both included."""
    if not 0 < mu <= L < math.inf:
        raise ConfigError(
            f"curvatures should satisfy 0 < mu <= L, got mu = {mu}, L = {L}.",
            hint="mu is the strong convexity and L the smoothness of the objective.",
        )
    return np.linspace(mu, L, points)


def sgd_bound(
    step: int, displacement: float, *, mu: float, L: float, alpha: float, sigma: float
) -> float:
    """Bound E||Delta_{t+1}||^2 for S = 1, w = 1: the case in which Eq. (19) is right.

    lambda^{2t} ||Delta_1||^2 + alpha^2 sigma^2 / (1 - lambda^2) with
    lambda = max(|1 - alpha mu|, |1 - alpha L|).

    Returns:
        The bound; infinity where lambda >= 1 and there is none.
    """
    return _geometric_bound(
        step,
        displacement,
        factor=_largest_norm([1.0], alpha, mu=mu, L=L),
        noise=(alpha * sigma) ** 2,
    )


def paper_bound(
    step: int,
    displacement: float,
    *,
    mu: float,
    L: float,
    alpha: float,
    weights: Weights,
    sigma: float,
) -> float:
    """Evaluate the claimed bound on f(theta_{t+1}) - f*, Eq. (12) and (20).

    (L/2) (lambda_max^{2t} ||Delta_1||^2 + alpha^2 sigma^2 S / (1 - lambda_max^2)): infinite, so
    empty, for every S >= 2, and right for S = 1. Arguments as in `sgd_bound`, ``weights`` are w_s.
    """
    factor = _largest_norm(weights, alpha, mu=mu, L=L)
    noise = (alpha * sigma) ** 2 * len(weights)
    return L / 2 * _geometric_bound(step, displacement, factor=factor, noise=noise)


@final
@dataclass(frozen=True, eq=False)
class LyapunovBound:
    """A bound on E Delta^2 along one eigendirection that holds whenever the iteration is stable.

    Attributes:
        form: P, which solves A^T P A - P = -I.
        rate: lambda_P = sqrt(1 - 1/lambda_max(P)) < 1, the contraction of A in the norm of P.
        noise: alpha sigma sqrt(P_11 sum_s w_s^2), the L2 norm of one step's noise in the norm of P.
    """

    form: Float[np.ndarray, "S S"]
    rate: float
    noise: float

    def root(self, step: int, state: Float[np.ndarray, " S"]) -> float:
        """Bound (E||x_{t+1}||_P^2)^{1/2} after t = ``step`` steps from x_1 = ``state``."""
        start = math.sqrt(state @ self.form @ state)
        return self.rate**step * start + self.noise / (1 - self.rate)

    def displacement(self, step: int, state: Float[np.ndarray, " S"]) -> float:
        """Bound E Delta_{t+1}^2 after t = ``step`` steps from x_1 = ``state``."""
        return self.root(step, state) ** 2 * self._first_entry()

    @property
    def floor(self) -> float:
        """The bound on E Delta^2 that is left as t grows."""
        return (self.noise / (1 - self.rate)) ** 2 * self._first_entry()

    def _first_entry(self) -> float:
        # Cauchy-Schwarz: Delta^2 <= (P^-1)_11 ||x||_P^2, never looser than by 1 / lambda_min(P).
        return float(np.linalg.inv(self.form)[0, 0])


def lyapunov_bound(
    weights: Weights, alpha: float, *, curvature: float, sigma: float
) -> LyapunovBound:
    """Prove what the paper set out to prove, for constant weights and a quadratic objective.

    If the spectral radius of the companion matrix A is below 1, P with A^T P A - P = -I exists, and
    (E||x_{t+1}||_P^2)^{1/2} is at most
    lambda_P^t ||x_1||_P + alpha sigma (P_11 sum_s w_s^2)^{1/2} / (1 - lambda_P).
    The triangle inequality in L2 needs no independence between the noise and x_t. Loose but valid:
    for S = 1, tau = 1, alpha = 0.1, sigma = 1 the floor is 1.0 where the exact value is 0.0526.
    """
    matrix = companion(weights, alpha, curvature=curvature)
    _check_stable(matrix)
    form = np.asarray(solve_discrete_lyapunov(matrix.T, np.eye(len(matrix))))
    rate = math.sqrt(max(0.0, 1 - 1 / np.linalg.eigvalsh(form)[-1]))
    squares = float(np.square(np.asarray(weights)).sum())
    return LyapunovBound(
        form=form, rate=rate, noise=alpha * sigma * math.sqrt(form[0, 0] * squares)
    )


def impulse_response(
    weights: Weights, alpha: float, *, curvature: float, steps: int
) -> Float[np.ndarray, " steps"]:
    """Return h_1 .. h_n, h_k = -alpha w^T A^{k-1} e_1: Delta k steps after one unit of noise."""
    matrix = companion(weights, alpha, curvature=curvature)
    state = np.eye(len(matrix))[0]
    response = np.empty(steps)
    for k in range(steps):
        response[k] = -alpha * np.asarray(weights) @ state
        state = matrix @ state
    return response


def stationary_variance(weights: Weights, alpha: float, *, curvature: float, sigma: float) -> float:
    """Return the exact E Delta^2 = sigma^2 sum_k h_k^2 reached as t grows, h the impulse response.

    The infinite sum is alpha^2 sigma^2 w^T W w with A W A^T - W = -e_1 e_1^T. Unlike the floor of
    Eq. (19) it knows that one noise drives S consecutive steps: averaging stale gradients of the
    same objective does not lower it.

    Example:
        >>> round(stationary_variance([0.2] * 5, 0.1, curvature=1.0, sigma=1.0), 4)
        0.055
    """
    matrix = companion(weights, alpha, curvature=curvature)
    _check_stable(matrix)
    first = np.eye(len(matrix))[0]
    gramian = solve_discrete_lyapunov(matrix, np.outer(first, first))
    w = np.asarray(weights)
    return float((alpha * sigma) ** 2 * (w @ gramian @ w))


def recall_fixed_point(
    centre: Float[np.ndarray, " d"],
    hessian: Float[np.ndarray, "d d"],
    *,
    values: Float[np.ndarray, "m d"],
) -> Float[np.ndarray, " d"]:
    """Return where `mean` (Eq. 8) ends on a quadratic when every step recalls the same gradients.

    (g + sum_j V_j) / (m + 1) vanishes at theta = c - H^{-1} sum_j V_j. When V_j = H (theta_0 - c_j)
    are gradients of other tasks at theta_0, that is c - sum_j (theta_0 - c_j): off by m times the
    mean displacement of the neighbours. Recalled at the first step only, they leave it at c.
    """
    return np.asarray(centre - np.linalg.solve(hessian, values.sum(axis=0)))


@final
@dataclass(frozen=True)
class ConvergenceReport:
    """What the theory says about one choice of step size and weights.

    Attributes:
        mu: Strong convexity.
        L: Smoothness.
        alpha: Step size.
        weights: w_0 .. w_{S-1}.
        spectral_norm: Largest spectral norm over the curvatures (the paper's lambda_max).
        spectral_radius: Largest spectral radius over the curvatures.
        worst_curvature: The curvature with the largest spectral radius.
        paper_condition: Whether lambda_max < 1 (Eq. 12, 18-20).
        our_condition: Whether the spectral radius is below 1 at every curvature of the grid.
        own_rate: alpha w_0, the step size the task's own gradient is left with.
    """

    mu: float
    L: float
    alpha: float
    weights: tuple[float, ...]
    spectral_norm: float
    spectral_radius: float
    worst_curvature: float
    paper_condition: bool
    our_condition: bool
    own_rate: float

    def __str__(self) -> str:
        answer = {True: "holds", False: "fails"}
        return "\n".join(
            [
                f"curvature in [{self.mu:g}, {self.L:g}], alpha = {self.alpha:g}, "
                f"S = {len(self.weights)}",
                f"  spectral norm    {self.spectral_norm:.4f}  paper's condition (norm < 1) "
                f"{answer[self.paper_condition]}",
                f"  spectral radius  {self.spectral_radius:.4f}  our condition (radius < 1) "
                f"{answer[self.our_condition]}, worst at curvature {self.worst_curvature:g}",
                f"  own rate         {self.own_rate:g}  (alpha w_0)",
            ]
        )


def report(mu: float, L: float, *, alpha: float, weights: Weights) -> ConvergenceReport:
    """Compare the paper's condition with ours for curvatures in [mu, L].

    Choice: one tau stands for all S gradients, as on a quadratic, and runs over 257 evenly spaced
    values with both ends. The paper's answer is exact all the same (for S >= 2 it is no, for S = 1
    the norm is largest at an end); ours is exact at the grid's values and continuous between them.

    Example:
        >>> verdict = report(0.5, 1.0, alpha=0.1, weights=[0.5, 0.5])
        >>> verdict.paper_condition, verdict.our_condition
        (False, True)
    """
    grid = curvature_grid(mu, L)
    matrices = np.stack([companion(weights, alpha, curvature=float(tau)) for tau in grid])
    norm, radii = float(spectral_norm(matrices).max()), spectral_radius(matrices)
    return ConvergenceReport(
        mu=mu,
        L=L,
        alpha=alpha,
        weights=tuple(float(w) for w in weights),
        spectral_norm=norm,
        spectral_radius=float(radii.max()),
        worst_curvature=float(grid[radii.argmax()]),
        paper_condition=norm < CONTRACTION,
        our_condition=float(radii.max()) < CONTRACTION,
        own_rate=alpha * float(weights[0]),
    )


def _checked_weights(weights: Weights) -> Float[np.ndarray, " S"]:
    w = np.asarray(weights, dtype=np.float64)
    if w.ndim != 1 or w.size == 0 or not ((w >= 0) & (w <= 1)).all():
        raise ConfigError(
            f"weights should be a non-empty sequence of numbers in [0, 1], got {weights}.",
            hint="Give w_0 .. w_{S-1}, newest first; `mean` over m recalled: m + 1 times 1/(m+1).",
        )
    return w


def _check_stable(matrix: Float[np.ndarray, "S S"]) -> None:
    radius = float(spectral_radius(matrix))
    if radius >= CONTRACTION:
        raise ConfigError(
            f"the iteration does not settle: spectral radius {radius:.6g}, expected less than 1.",
            hint="Lower alpha, or give old gradients less weight.",
        )


def _largest_norm(weights: Weights, alpha: float, *, mu: float, L: float) -> float:
    # The norm is convex in tau (A is affine in tau), so its largest value is at an end of [mu, L].
    ends = curvature_grid(mu, L, points=2)
    return max(
        float(spectral_norm(companion(weights, alpha, curvature=float(tau)))) for tau in ends
    )


def _geometric_bound(step: int, displacement: float, *, factor: float, noise: float) -> float:
    if factor >= CONTRACTION:
        return math.inf
    return float(factor ** (2 * step) * displacement**2 + noise / (1 - factor**2))
