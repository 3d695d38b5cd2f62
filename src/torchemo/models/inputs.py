"""What a network accepts: checks with messages for people, before anything is computed."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from torchemo.core.errors import ConfigError, DataError, ShapeError
from torchemo.core.types import Params


def check_examples(x: Tensor, example: Sequence[int], *, what: str) -> None:
    """Raise `ShapeError` or `DataError` unless ``x`` is floating point ``[B, n, *example]``."""
    expected = f"[task, example, {', '.join(map(str, example))}]"
    if x.ndim != len(example) + 2:
        raise ShapeError(
            f"{what}: inputs should have shape {expected}, got {list(x.shape)}.",
            hint="Inputs start with a task axis: write x[None] for the examples of a single task.",
        )
    if tuple(x.shape[2:]) != tuple(example):
        raise ShapeError(
            f"{what}: inputs should have shape {expected}, got {list(x.shape)}.",
            hint="Resize or convert the inputs, or build the network for their size and channels.",
        )
    if 0 in x.shape:
        raise ShapeError(
            f"{what}: inputs should hold at least one task and one example, got {list(x.shape)}."
        )
    if not x.is_floating_point():
        raise DataError(
            f"{what}: inputs should be floating point, got {x.dtype}.",
            hint="Scale images to [0, 1] first: x.float() / 255.",
        )


def check_params(
    params: Params, expected: Mapping[str, Sequence[int]], *, tasks: int, what: str
) -> None:
    """Raise `ShapeError` naming the first tensor that is missing or is not ``[tasks, *shape]``.

    Args:
        params: Per-task parameters; tensors that are not expected are left to whoever put them there.
        expected: Shapes by name, without the task axis.
        tasks: Number of tasks B.
        what: Whose parameters they are, for the message.
    """
    for name, shape in expected.items():
        if name not in params:
            raise ShapeError(
                f"{what}: parameter '{name}' is missing, got {sorted(params)}.",
                hint="Pass all tensors that the network's init returns.",
            )
        got = tuple(params[name].shape)
        if got != (tasks, *shape):
            no_axis = got == tuple(shape)
            raise ShapeError(
                f"{what}: parameter '{name}' should have shape {[tasks, *shape]}"
                f" (task axis first), got {list(got)}.",
                hint="Give the parameters a task axis with torchemo.core.tree.expand(params, tasks)."
                if no_axis
                else "Use parameters of this very network, one row for each task of the inputs.",
            )


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Raise `ConfigError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(
            f"option '{option}' should be one of {', '.join(choices)}, got '{value}'."
        )


def check_positive(**options: int) -> None:
    """Raise `ConfigError` naming the first option that is below 1."""
    for option, value in options.items():
        if value < 1:
            raise ConfigError(f"option '{option}' should be at least 1, got {value}.")
