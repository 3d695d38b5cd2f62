"""The state of an optimizer as named tensors, as checkpoints hold it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchemo.config.run import OptimizerConfig, OuterConfig
from torchemo.core.errors import CheckpointError
from torchemo.core.types import Params
from torchemo.memory.build import RATE

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps of every parameter."""
_MOMENTUM = ("momentum_buffer",)
"""What gradient descent with momentum keeps."""


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer of some groups of parameters; a group may name its own rate and decay."""
    decay = config.weight_decay
    if config.optimizer == "sgd":
        how: dict[str, Any] = {"momentum": config.momentum, "nesterov": config.nesterov}
        return torch.optim.SGD(groups, lr=config.lr, weight_decay=decay, **how)
    if decay:
        return torch.optim.AdamW(groups, lr=config.lr, weight_decay=decay)
    return torch.optim.Adam(groups, lr=config.lr)


def outer_groups(learner: Params, memory: Params, config: OuterConfig) -> list[dict[str, Any]]:
    """Group what the outer loop learns.

    Learned inner rates are apart if they have an outer rate of their own. A memory does not decay.
    """
    own = config.rates_lr
    rates = {n: p for n, p in learner.items() if own is not None and n.startswith(RATE)}
    others = [p for n, p in learner.items() if n not in rates]
    sets: list[tuple[list[Tensor], float | None, dict[str, float]]] = [
        (others, config.lr, {}),
        (list(rates.values()), own, {}),
        (list(memory.values()), config.lr, {"weight_decay": 0.0}),
    ]
    return [{"params": ps, "lr": lr, "initial_lr": lr, **how} for ps, lr, how in sets if ps]


def optimizer_state(optimizer: torch.optim.Optimizer) -> Params:
    """Flatten an optimizer's per-parameter tensors: ``{"3.exp_avg": ...}``."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": tensor.detach()
        for number, parts in state.items()
        for name, tensor in parts.items()
        if isinstance(tensor, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Params, *, gone: range) -> None:
    """Give an optimizer its saved tensors.

    Args:
        optimizer: Of the same parameters as the saved one.
        saved: What `optimizer_state` returned.
        gone: Numbers of saved parameters that are gone.

    Raises:
        CheckpointError: The tensors are not those of this optimizer.
    """
    state: dict[int, Params] = {}
    for key, tensor in saved.items():
        text, _, name = key.partition(".")
        if not text.isdecimal():
            raise CheckpointError(f"the saved optimizer has an entry {key!r:.60}.")
        number = int(text)
        if number in gone:
            continue
        # Numbers follow the order of the parameters, so those after the gap close it.
        now = number if number < gone.start else number - len(gone)
        state.setdefault(now, {})[name] = tensor.clone()
    _check_optimizer(optimizer, state)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _check_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[int, Params]) -> None:
    """Refuse a saved state that is not one of this optimizer for these parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names: tuple[str, ...] = _MOMENTUM if optimizer.defaults.get("momentum") else ()
    names = _MOMENTS if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) else names
    for number, parts in state.items():
        shape = params[number].shape if number < len(params) else None
        for name in (*names, *parts):
            due = torch.Size() if name == "step" else shape
            got = parts[name].shape if name in parts else None
            if name not in names or due is None or got != due:
                raise CheckpointError(
                    f"the saved optimizer has {list(got or ())} for '{name!s:.40}' of parameter"
                    f" {number}, this run expects {'none' if due is None else list(due)}.",
                    hint="Open it with the configuration the run was started with.",
                )
