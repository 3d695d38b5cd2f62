"""What a memory of gradients keeps of a task, and what it recalls at an inner step (A6).

A stored gradient belongs to the parameters at which it was computed. When a task comes back, its inner
steps take another path, and the stored gradient is out of place by curvature times distance. ``secant``
keeps just enough to correct that. With d_s = theta_{s+1} - theta_s and y_s = g_{s+1} - g_s of the stored
path,

    g(theta) ~ g_s + f_s <f_s, theta - theta_s>,    f_s = y_s / sqrt(<d_s, y_s>),

which is exact along the path for a quadratic loss. It needs no further gradient: the path is known. A step
without positive curvature has f_s = 0, and the last step takes the f of the one before.

``gauss_newton`` keeps one gradient, half-way along the path, with one factor per support example and output
(`torchemo.learners.curvature`); the sum goes over all factors. Only a lifelong memory keeps it.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.tree import tree_map
from torchemo.core.types import Params

Content: TypeAlias = Literal["first", "last", "mean", "per_step", "secant", "query", "meta"]

_AXES = {"per_step": 1, "secant": 2, "gauss_newton": 2}
_TINY = 1e-8


def leading_axes(content: str) -> int:
    """Return how many axes of a value stand before the shape of the tensor: steps, and parts of a secant."""
    return _AXES.get(content, 0)


def numbers_per_entry(content: str, steps: int) -> int:
    """Return how many numbers are kept for each number of a remembered tensor."""
    return {"per_step": steps, "secant": 3 * steps}.get(content, 1)


def pick(
    content: str, gradients: tuple[Params, ...], path: tuple[Params, ...], extra: Params
) -> Params:
    """Return what to keep of the support gradients of B tasks, ``{name: [B, ..., *shape]}``.

    Args:
        content: Which of them, see `torchemo.memory.emo.EMO`.
        gradients: g_0, ..., g_{S-1}.
        path: theta_0, ..., theta_S; needed by ``secant`` alone.
        extra: What the learner wants kept beside them, the same at all steps.
    """
    if not gradients:
        raise ConfigError(f"there is no '{content}' gradient to remember.")
    stacked = {n: torch.stack([g[n] for g in gradients], 1) for n in gradients[0]}
    if content == "per_step":
        return stacked | {n: v[:, None] for n, v in extra.items()}
    if content == "secant":
        zeros = tree_map(torch.zeros_like, extra)
        still = {n: torch.stack((v, zeros[n], zeros[n]), 1)[:, None] for n, v in extra.items()}
        return _secants(stacked, path) | still
    if content == "mean":
        return tree_map(lambda g: g.mean(1), stacked) | extra
    return gradients[0 if content == "first" else -1] | extra


def at_step(values: Params, content: str, step: int, theta: Params | None) -> Params:
    """Return the recalled gradients of an inner step, ``{name: [B, m, *shape]}``.

    Args:
        values: Recalled values ``{name: [B, m, ..., *shape]}``.
        content: What they are.
        step: Inner step s.
        theta: Parameters of the tasks at this step, to which curvature moves the gradients; None recalls
            them as they were stored.
    """
    if leading_axes(content) == 0:
        return values
    now = tree_map(lambda v: v[:, :, min(step, v.shape[2] - 1)], values)
    return now if content == "per_step" else _followed(now, theta or {})


def _secants(gradients: Params, path: tuple[Params, ...]) -> Params:
    """Return gradient, anchor and factor of every step, ``{name: [B, S, 3, *shape]}``."""
    if not path:
        raise ConfigError(
            "content 'secant' needs the parameters of the inner path.", hint="Pass path=..."
        )
    steps = next(iter(gradients.values())).shape[1]
    anchors = {n: torch.stack([theta[n] for theta in path[:steps]], 1) for n in gradients}
    moves, bends = tree_map(_differences, anchors), tree_map(_differences, gradients)
    product = _dot(moves, bends)
    straight = product <= _TINY * (_dot(moves, moves) * _dot(bends, bends)).sqrt()
    scale = torch.where(straight, 0.0, torch.where(straight, 1.0, product).rsqrt())
    factors = {n: _last_again(_column(scale, y) * y, like=gradients[n]) for n, y in bends.items()}
    return {n: torch.stack((gradients[n], anchors[n], factors[n]), 2) for n in gradients}


def _followed(values: Params, theta: Params) -> Params:
    """Move recalled gradients ``[B, m, 2 + factors, *shape]`` to where the tasks are now."""
    slopes = {n: v[:, :, 0] for n, v in values.items()}
    moving = [n for n in values if n in theta]
    if not moving:
        return slopes
    factors = {n: values[n][:, :, 2:] for n in moving}
    away = {n: (theta[n][:, None] - values[n][:, :, 1])[:, :, None] for n in moving}
    along = _dot(factors, away, axes=3)
    return slopes | {n: slopes[n] + (_column(along, f) * f).sum(2) for n, f in factors.items()}


def _differences(stacked: Tensor) -> Tensor:
    return stacked[:, 1:] - stacked[:, :-1]


def _last_again(factors: Tensor, *, like: Tensor) -> Tensor:
    """Give the last step the factor of the one before; a single step has none."""
    if factors.shape[1] == 0:
        return torch.zeros_like(like)
    return torch.cat((factors, factors[:, -1:]), 1)


def _dot(left: Params, right: Params, *, axes: int = 2) -> Tensor:
    """Return inner products over all tensors, with the leading axes kept."""
    parts = [(left[n] * right[n]).flatten(axes).sum(axes) for n in left]
    return torch.stack(parts).sum(0)


def _column(scale: Tensor, like: Tensor) -> Tensor:
    return scale.view(*scale.shape, *(1,) * (like.dim() - scale.dim()))


def check_gradients(grads: Params, known: Mapping[str, torch.Size], *, tasks: int) -> None:
    """Refuse gradients that the memory could not tell from none: other names, or no task axis."""
    for name, grad in grads.items():
        if name not in known:
            raise ShapeError(
                f"gradients: the module has no trainable parameter '{name}'.",
                hint=f"It has: {', '.join(known)}.",
            )
        if grad.shape != (tasks, *known[name]):
            raise ShapeError(
                f"gradients: '{name}' should have the shape {[tasks, *known[name]]}, with a task axis"
                f" in front, got {list(grad.shape)}.",
                hint="One task alone has a task axis of length 1: grad[None].",
            )
