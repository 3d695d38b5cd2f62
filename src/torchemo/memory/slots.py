"""How slots that hold offsets learn: an Adam step along the gradients of the tasks that recalled them.

A task starts from ``theta + sum_j a_j V_j``. Since d(mean_b L_b) / dV_j = mean_b a_bj G_b, stepping slot j
along its share of the per-task gradients G_b is gradient descent on the content of the memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params


@final
@dataclass(frozen=True)
class SlotAdam:
    """An Adam step over memory slots.

    Args:
        lr: Rate of the values.
        key_lr: Rate of the slot keys (0 = they stay where they were seeded).
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        decay: Decoupled decay of the values towards zero, per step and unit of ``lr``.
        update: ``dense`` steps every filled slot at every batch; ``lazy`` only those recalled in it, with
            a step count per slot, so that idle slots do not drift on old moments.
    """

    lr: float = 1e-3
    key_lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.0
    update: str = "dense"

    def __post_init__(self) -> None:
        if self.update not in ("dense", "lazy"):
            raise ConfigError(f"slot update should be 'dense' or 'lazy', got '{self.update}'.")
        if self.lr < 0 or self.key_lr < 0 or self.decay < 0:
            raise ConfigError(
                f"slot rates and decay should not be negative,"
                f" got lr {self.lr}, key_lr {self.key_lr}, decay {self.decay}."
            )

    def at(self, factor: float) -> "SlotAdam":
        """Return the same step with its rates multiplied by ``factor``."""
        return replace(self, lr=self.lr * factor, key_lr=self.key_lr * factor)

    def moved(
        self, slots: Int[Tensor, "task m"], weights: Float[Tensor, "task m"], *, filled: int
    ) -> Bool[Tensor, " slot"]:
        """Return which filled slots step, on the host: all, or those that were recalled with a weight."""
        if self.update == "dense":
            return torch.ones(filled, dtype=torch.bool, device="cpu")
        used = (weights > 0).to(weights.dtype).flatten()
        return (used.new_zeros(filled).index_add_(0, slots.flatten(), used) > 0).cpu()

    def step_group_(
        self,
        value: Tensor,
        gradient: Tensor,
        moments: Params,
        moved: Bool[Tensor, " slot"],
        *,
        group: str,
    ) -> None:
        """Step the first slots of a tensor in place with its moments: ``keys``, or ``values.<name>``."""
        filled = value.shape[0]
        self.step_(
            value,
            gradient,
            first=moments[f"first.{group}"][:filled],
            second=moments[f"second.{group}"][:filled],
            steps=moments["steps"][:filled],
            moved=moved,
            lr=self.key_lr if group == "keys" else self.lr,
            decay=0.0 if group == "keys" else self.decay,
        )

    def step_(
        self,
        value: Tensor,
        gradient: Tensor,
        *,
        first: Tensor,
        second: Tensor,
        steps: Int[Tensor, " slot"],
        moved: Bool[Tensor, " slot"],
        lr: float,
        decay: float,
    ) -> None:
        """Step ``value[moved]`` along ``gradient[moved]`` in place; ``steps`` are already counted."""
        shape = (-1,) + (1,) * (value.dim() - 1)
        beta1, beta2 = self.betas
        rows = slice(None) if bool(moved.all()) else moved  # a slice copies nothing
        # Counted on the host in float64: in float32, 1 - 0.999 has four right digits.
        count = steps[rows].double().view(shape)
        m = first[rows].mul_(beta1).add_(gradient[rows], alpha=1 - beta1)
        v = second[rows].mul_(beta2).addcmul_(gradient[rows], gradient[rows], value=1 - beta2)
        first[rows], second[rows] = m, v
        m_hat = m / (1 - beta1**count).to(m)
        denominator = (v.sqrt() / (1 - beta2**count).sqrt().to(v)).add_(self.eps)
        value[rows] = value[rows] * (1 - lr * decay) - (lr * m_hat / denominator).to(value.dtype)


def zero_moments(keys: Float[Tensor, "slot dim"], shapes: Mapping[str, torch.Size]) -> Params:
    """Return what Adam knows of T slots before their first step: step counts and moments."""
    moments = {"steps": torch.zeros(len(keys), dtype=torch.int64, device="cpu")}
    named = {f"values.{name}": shape for name, shape in shapes.items()}
    for group, shape in {"keys": keys.shape[1:], **named}.items():
        for moment in ("first", "second"):
            moments[f"{moment}.{group}"] = keys.new_zeros(len(keys), *shape)
    return moments


def slot_gradients(
    rows: Params,
    slots: Int[Tensor, "task m"],
    weights: Float[Tensor, "task m"],
    *,
    filled: int,
) -> Params:
    """Return ``mean_b a_bj G_b`` for every filled slot j: the gradient of the outer loss in V_j.

    Args:
        rows: Per-task outer gradients G_b ``{name: [B, *shape]}``.
        slots: Recalled slots of each task.
        weights: Their recall weights a_bj (zero for tasks that were adapted without recall).
        filled: Number of filled slots n.
    """
    tasks = slots.shape[0]
    share = weights.new_zeros(tasks, filled).scatter_add(1, slots, weights) / tasks
    return {
        name: torch.tensordot(share.to(row.dtype), row, ([0], [0])) for name, row in rows.items()
    }
