"""The inner loop: adapt B tasks at once by differentiable gradient steps (Eq. 1, 2, 7).

Tasks are independent, so the gradient of the sum of their losses with respect to ``[B, *shape]``
parameters is the stack of the tasks' gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.tree import detach, leaf, select, tree_map
from torchemo.core.types import Batch, Direction, Loss, Params, Start
from torchemo.learners.learner import Fitted

State: TypeAlias = tuple[Params, ...]
Forward: TypeAlias = Callable[[Params, Tensor, int], Tensor]
"""``(params {name: [B, ...]}, x [B, n, ...], inner step) -> out [B, n, n_out]``."""


@runtime_checkable
class Rule(Protocol):
    """How a direction becomes a step; ``theta <- theta - rate * update``.

    ``lr`` is the rate where the learner does not learn its own. State starts afresh in every task.
    """

    @property
    def lr(self) -> float:
        """Constant rate alpha."""
        ...

    def init(self, params: Params) -> State:
        """Return the state before the first step."""
        ...

    def update(self, direction: Params, state: State) -> tuple[Params, State]:
        """Turn a direction into an update (not yet scaled by the rate) and the next state."""
        ...


@final
@dataclass(frozen=True)
class SGD:
    """Eq. 1: ``theta <- theta - alpha d``; ``lr`` is alpha."""

    lr: float = 0.05

    def init(self, params: Params) -> State:
        """Return no state."""
        return ()

    def update(self, direction: Params, state: State) -> tuple[Params, State]:
        """Return the direction itself."""
        return direction, ()


@final
@dataclass(frozen=True)
class Momentum:
    """``v <- mu v + d; theta <- theta - alpha v``, or along ``d + mu v`` with Nesterov."""

    lr: float = 0.05
    mu: float = 0.9
    nesterov: bool = False

    def init(self, params: Params) -> State:
        """Return zero velocity."""
        return (tree_map(torch.zeros_like, params),)

    def update(self, direction: Params, state: State) -> tuple[Params, State]:
        """Accumulate the velocity."""
        velocity = tree_map(lambda d, v: self.mu * v + d, direction, state[0])
        if self.nesterov:
            return tree_map(lambda d, v: d + self.mu * v, direction, velocity), (velocity,)
        return velocity, (velocity,)


@final
@dataclass(frozen=True)
class Adam:
    """Adam with bias correction, differentiable also where a gradient is exactly zero."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def init(self, params: Params) -> State:
        """Return zero moments and a zero step count for every tensor."""
        zeros = tree_map(torch.zeros_like, params)
        count = tree_map(lambda p: p.new_zeros(()), params)
        return zeros, zeros, count

    def update(self, direction: Params, state: State) -> tuple[Params, State]:
        """Return ``m_hat / (sqrt(u_hat) + eps)``."""
        beta1, beta2 = self.betas
        first = tree_map(lambda d, m: beta1 * m + (1 - beta1) * d, direction, state[0])
        second = tree_map(lambda d, u: beta2 * u + (1 - beta2) * d * d, direction, state[1])
        count = tree_map(lambda c: c + 1, state[2])
        return tree_map(self._ratio, first, second, count), (first, second, count)

    def _ratio(self, m: Tensor, u: Tensor, count: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        m_hat = m / (1 - beta1**count)
        u_hat = u / (1 - beta2**count)
        # The root has an infinite slope at 0 (dead filters): take it of 1 there and mask the result.
        dead = u_hat == 0
        ratio = m_hat / (torch.where(dead, 1.0, u_hat).sqrt() + self.eps)
        return torch.where(dead, 0.0, ratio)


RULES: dict[str, type[SGD] | type[Momentum] | type[Adam]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adam": Adam,
}


@contextmanager
def differentiable() -> Iterator[None]:
    """Say in words that a network has an operation that torch differentiates only once."""
    try:
        yield
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise ConfigError(
            f"the network has an operation that can be differentiated only once ({error!s:.120}).",
            hint="Use learner.order = 1; or, for attention, torch.nn.attention.sdpa_kernel with MATH.",
        ) from error


def task_gradients(
    losses: Float[Tensor, " task"], tensors: Params, *, create_graph: bool = False
) -> Params:
    """Differentiate each task's loss in its own parameters; tensors a loss does not use get zeros."""
    with differentiable():
        found = torch.autograd.grad(
            losses.sum(), list(tensors.values()), create_graph=create_graph, allow_unused=True
        )
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(tensors.items(), found, strict=True)
    }


def rate_at(rates: Params | None, step: int) -> Params | None:
    """Pick the rates of one inner step: entry min(step, R - 1) of the step axis."""
    if rates is None:
        return None
    return {name: rate[:, min(step, rate.shape[1] - 1)] for name, rate in rates.items()}


def descend(theta: Params, update: Params, *, lr: float, rates: Params | None) -> Params:
    """Return ``theta - rate * update`` for the tensors in ``update``; the others are kept."""
    moved = dict(theta)
    for name, step in update.items():
        rate = lr if rates is None or name not in rates else rates[name]
        moved[name] = theta[name] - rate * step
    return moved


def adapt(
    forward: Forward,
    start: Start,
    support: Batch | Callable[[int], Batch],
    *,
    loss: Loss,
    rule: Rule,
    steps: int,
    names: Sequence[str],
    order: int = 2,
    direction: Direction | None = None,
) -> Fitted:
    """Take ``steps`` inner steps on the support sets of B tasks (Eq. 2; Eq. 7 with ``direction``).

    Args:
        forward: The network at an inner step.
        start: Where the tasks begin, and their own rates if any.
        support: Support sets, or a function that gives the examples of each inner step.
        loss: Per-task loss.
        rule: Turns a direction into an update.
        steps: S, how many steps.
        names: The adapted tensors.
        order: 2 keeps the graph of the gradients, 1 detaches them, 0 keeps no graph at all.
        direction: EMO: maps the gradients of a step to Aggr(g, V); identity by default.
    """
    _check_adapt(start.theta, names, steps, order)
    theta = _differentiable(start.theta, names)
    state = rule.init(select(theta, names))
    path, losses, gradients = [theta], [], []
    for step in range(steps):
        batch = support(step) if callable(support) else support
        before, g = _gradient(forward, theta, batch, step, loss=loss, names=names, order=order)
        update, state = rule.update(g if direction is None else direction(g, step, theta), state)
        theta = descend(theta, update, lr=rule.lr, rates=rate_at(start.rates, step))
        if order == 0:
            theta, state = detach(theta), tuple(detach(part) for part in state)
        path.append(theta)
        losses.append(before.detach())
        gradients.append(g)
    return Fitted(theta, tuple(path), tuple(gradients), _stacked(losses, theta))


def _gradient(
    forward: Forward,
    theta: Params,
    batch: Batch,
    step: int,
    *,
    loss: Loss,
    names: Sequence[str],
    order: int,
) -> tuple[Float[Tensor, " task"], Params]:
    """Return the tasks' support losses and gradients at an inner step."""
    if order == 0:
        theta = tree_map(leaf, theta)
    with torch.enable_grad():
        losses = loss(forward(theta, batch.x, step), batch.y)
        g = task_gradients(losses, select(theta, names), create_graph=order == 2)
    return losses, g if order == 2 else detach(g)


def _stacked(losses: list[Tensor], theta: Params) -> Float[Tensor, "task step"]:
    """Lay the losses before each step side by side; there are none without a step."""
    if losses:
        return torch.stack(losses, 1)
    like = next(iter(theta.values()))
    return like.new_zeros(len(like), 0)


def _differentiable(theta: Params, names: Sequence[str]) -> Params:
    """Give every adapted tensor a node of its own to differentiate in.

    Without it the gradient of one tensor would also run through another one that was made from it
    (Proto-MAML's head is a function of the body): inner gradients are partial derivatives.
    """
    fresh = {
        n: theta[n].view_as(theta[n]) if theta[n].requires_grad else leaf(theta[n]) for n in names
    }
    return {**theta, **fresh}


def _check_adapt(theta: Params, names: Sequence[str], steps: int, order: int) -> None:
    if steps < 0:
        raise ConfigError(f"inner steps should be 0 or more, got {steps}.")
    if order not in (0, 1, 2):
        raise ConfigError(f"order should be 0 (no graph), 1 or 2, got {order}.")
    unknown = [name for name in names if name not in theta]
    if unknown:
        raise ConfigError(
            f"tensors to adapt {unknown} are not in the model; it has {sorted(theta)}.",
            hint="Name the head and the adapted tensors as the model names them.",
        )
