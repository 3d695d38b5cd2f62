"""Gauss-Newton factors of a support loss: what a recalled gradient needs to follow the parameters.

With outputs z of the support set, their Jacobian J at theta, and the curvature B = R^T R of the loss in z,

    grad L(theta') ~ grad L(theta) + J^T B J (theta' - theta) = g + sum_k f_k <f_k, theta' - theta>,

where f_k is row k of R J. This is exact for a network that is linear in what adapts (ANIL's head) under the
squared error. There is one factor per example and output.

A quadratic model is followed by gradient steps at rates R. Along eigenvectors of ``R^1/2 J^T B J R^1/2`` with
eigenvalues above 1 such steps overshoot, and above 2 they diverge, where the network itself would bend away.
`steady` sets these eigenvalues to 1.
"""

import math

import torch
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy, mean_squared_error, task_loss
from torchemo.core.types import Loss, Params


def check_loss(loss: Loss) -> None:
    """Refuse a loss whose curvature in the outputs is not known here."""
    if loss not in (cross_entropy, mean_squared_error, task_loss):
        raise ConfigError("Gauss-Newton factors are for cross-entropy and for the squared error.")


def roots(out: Tensor, y: Tensor) -> Tensor:
    """Return R z of B tasks, ``[B, n * n_out]``, where R^T R is the curvature of the mean loss in z.

    For the squared error R is a number. For cross-entropy with probabilities p the curvature of an example is
    ``diag(p) - p p^T``, and row c of R z is ``sqrt(p_c) (z_c - <p, z>)``.
    """
    if y.is_floating_point():
        return math.sqrt(2 / out[0].numel()) * out.flatten(1)
    p = out.detach().softmax(2)
    centred = out - (p * out).sum(2, keepdim=True)
    return ((p / out.shape[1]).sqrt() * centred).flatten(1)


def factors(rows: Tensor, theta: Params, *, scale: float = 1.0) -> Params:
    """Differentiate every row: ``[B, rows]`` to ``{name: [B, rows, *shape]}``.

    Args:
        rows: What `roots` returns, a function of ``theta``.
        theta: Tensors to differentiate in.
        scale: Factor of the loss.
    """
    found = []
    for k in range(rows.shape[1]):
        one = torch.autograd.grad(
            rows[:, k].sum(), list(theta.values()), retain_graph=True, allow_unused=True
        )
        found.append(
            [
                torch.zeros_like(t) if g is None else g
                for g, t in zip(one, theta.values(), strict=True)
            ]
        )
    return {
        name: math.sqrt(scale) * torch.stack([row[i] for row in found], 1)
        for i, name in enumerate(theta)
    }


def steady(found: Params, rates: Params) -> Params:
    """Flatten directions in which a gradient step would overshoot; all others keep their curvature.

    Args:
        found: Factors ``{name: [B, rows, *shape]}``.
        rates: Rate of every number of the tensors, or numbers that expand to them, ``{name: [B, ...]}``.
    """
    flat = {name: rows.flatten(2) for name, rows in found.items()}
    scaled = {n: rows * _along(rates[n], found[n]).clamp(min=0) for n, rows in flat.items()}
    gram = torch.stack([scaled[n] @ flat[n].mT for n in flat]).sum(0)
    values, vectors = torch.linalg.eigh(gram)
    turned = vectors.mT * values.clamp(min=1).rsqrt()[..., None]
    return {n: (turned @ rows).view_as(found[n]) for n, rows in flat.items()}


def _along(rate: Tensor, rows: Tensor) -> Tensor:
    """Give every number of a row its rate, ``[B, 1, numbers]``."""
    wide = rate.view(*rate.shape, *(1,) * (rows.dim() - 1 - rate.dim()))
    return wide.expand(rows[:, 0].shape).flatten(1)[:, None]
