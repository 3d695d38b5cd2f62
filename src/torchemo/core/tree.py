"""Algebra on named tensors, ``dict[str, Tensor]``: the parameter convention of ``torch.func``."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from torchemo.core.errors import ShapeError
from torchemo.core.types import Params


def tree_map(function: Callable[..., Tensor], first: Params, *rest: Params) -> Params:
    """Apply ``function`` to the tensors of the same name in all trees."""
    return {name: function(value, *(tree[name] for tree in rest)) for name, value in first.items()}


def expand(params: Params, tasks: int) -> Params:
    """Give every tensor a leading task axis without copying: ``[*shape] -> [B, *shape]``."""
    return tree_map(lambda p: p.expand(tasks, *p.shape), params)


def select(params: Params, names: Iterable[str]) -> Params:
    """Keep the named tensors, in the order of ``names``."""
    return {name: params[name] for name in names}


def detach(params: Params) -> Params:
    """Cut every tensor from its graph."""
    return tree_map(torch.Tensor.detach, params)


def leaf(tensor: Tensor) -> Tensor:
    """Return a leaf of the graph that shares the tensor's numbers."""
    return tensor.detach().requires_grad_()


def leaves(params: Params) -> Params:
    """Copy every tensor into a fresh leaf of the graph (its gradient can be asked for)."""
    return tree_map(lambda p: p.detach().clone().requires_grad_(), params)


def carried_back(ends: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Carry gradients back from where they are known, ``(tensor, gradient)``; zeros where none arrives."""
    found = torch.autograd.grad(
        [end for end, _ in ends], inputs, [row for _, row in ends], allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def with_rows(tensor: Tensor, rows: int, *, axis: int = 0, keep: bool = False) -> Tensor:
    """Return a tensor with ``rows`` entries along an axis that counts classes.

    With as many entries as there are, the tensor stays as it is.

    Args:
        tensor: Any tensor.
        rows: How many entries.
        axis: The axis.
        keep: Keep its first entries, and put new ones at the mean of all; else all are at the mean.
    """
    known = tensor.shape[axis]
    if known == rows:
        return tensor
    kept = min(known, rows) if keep else 0
    shape = [*tensor.shape]
    shape[axis] = rows - kept
    new = tensor.mean(axis, keepdim=True).expand(shape)
    return torch.cat([tensor.narrow(axis, 0, kept), new], axis)


def norms(params: Params) -> Tensor:
    """Return the Euclidean norm of each task's parameters, ``[B]``."""
    return torch.stack([_rows(p).square().sum(1) for p in params.values()]).sum(0).sqrt()


def flatten(params: Params) -> Tensor:
    """Lay each task's tensors end to end: ``[B, P]``."""
    return torch.cat([_rows(p) for p in params.values()], dim=1)


def is_finite(params: Params) -> Tensor:
    """Say for each task whether all its numbers are finite: bool ``[B]``."""
    return torch.stack([_rows(p).isfinite().all(1) for p in params.values()]).all(0)


def _rows(tensor: Tensor) -> Tensor:
    # Not flatten(1): a parameter may be a single number, [B] with its task axis.
    return tensor.reshape(tensor.shape[0], tensor.shape[1:].numel())


def check_same_structure(
    expected: Mapping[str, torch.Size], got: Params, *, what: str, leading: int = 1
) -> None:
    """Raise `ShapeError` naming the first tensor whose name or shape differs."""
    missing = [name for name in expected if name not in got]
    extra = [name for name in got if name not in expected]
    if missing or extra:
        raise ShapeError(
            f"{what}: expected tensors {sorted(expected)}, got {sorted(got)}"
            f" (missing {missing}, unexpected {extra}).",
            hint="Use the same network, and the same set of adapted tensors, as before.",
        )
    for name, shape in expected.items():
        if got[name].shape[leading:] != shape:
            raise ShapeError(
                f"{what}: tensor '{name}' should have shape {list(shape)},"
                f" got {list(got[name].shape[leading:])}.",
                hint="Use the same network, and the same set of adapted tensors, as before.",
            )


def in_dtype_of(params: Params, other: Tensor, work: Callable[[Params], Params]) -> Params:
    """Apply ``work`` in a precision that holds both these tensors and another one; return it in theirs.

    Half-precision gradients meet memories that are kept in float32.
    """
    wide = {n: p.to(torch.promote_types(p.dtype, other.dtype)) for n, p in params.items()}
    return {n: p.to(params[n].dtype) if n in params else p for n, p in work(wide).items()}
