"""The task axis of any structure of tensors: take some tasks of it, or join tasks again.

A structure is a tensor, None, or a dict, list, tuple, NamedTuple or dataclass of structures. The first axis
of every tensor counts tasks. A class may name fields that all tasks share in
a method ``shared_fields``; these stay whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


def take(value: T, tasks: slice) -> T:
    """Take some of the tasks; their axis stays.

    Example:
        >>> take({"w": torch.arange(6).view(3, 2)}, slice(1, 2))
        {'w': tensor([[2, 3]])}
    """
    return cast(T, _zip([value], lambda tensors: tensors[0][tasks]))


def join(values: Sequence[T]) -> T:
    """Join tasks in order; what they share is that of the first. One value alone is returned as it is.

    Example:
        >>> join([{"w": torch.zeros(1, 2)}, {"w": torch.ones(1, 2)}])["w"].tolist()
        [[0.0, 0.0], [1.0, 1.0]]
    """
    return values[0] if len(values) == 1 else cast(T, _zip(list(values), torch.cat))


def _zip(values: list[Any], function: Callable[[list[Tensor]], Tensor]) -> Any:
    """Apply ``function`` to the tensors in the same place of all values."""
    first: Any = values[0]
    if isinstance(first, Tensor):
        return function(values)
    if isinstance(first, dict):
        return {name: _zip([v[name] for v in values], function) for name in first}
    if hasattr(first, "_replace") and isinstance(first, tuple):
        named: Any = first
        return named._replace(**_named(values, named._fields, function))
    if isinstance(first, list | tuple):
        return type(first)(_zip(list(parts), function) for parts in zip(*values, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **_named(values, [f.name for f in fields(first)], function))
    return first


def _named(
    values: list[Any], names: Sequence[str], function: Callable[[list[Tensor]], Tensor]
) -> dict[str, Any]:
    ask = getattr(values[0], "shared_fields", None)
    shared = () if ask is None else ask()
    return {n: _zip([getattr(v, n) for v in values], function) for n in names if n not in shared}
