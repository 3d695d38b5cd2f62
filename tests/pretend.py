"""A pretend accelerator: tensors that say they are on device ``pretend`` and compute on the CPU.

Mixed devices, generators of the CPU and ``.numpy()`` fail as they do on CUDA, and every wait of the host for
the device is counted with the line that waits. It has no streams and no kernels of its own, and says nothing
about speed. `on_pretend` switches it on; nothing but its own tensors changes elsewhere.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
WAITS: Counter[str] = Counter()
"""How often the host waited for the device, by file and line of torchemo."""
SENT: Counter[torch.dtype] = Counter()
"""How many bytes the host sent to the device, by type."""

aten = torch.ops.aten
_COPIES = {aten._to_copy.default, aten.copy_.default}
_INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
_WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}
_STRICT = {"cat", "stack", "index_select", "gather", "scatter", "scatter_add", "scatter_add_"} | {
    "mm",
    "bmm",
    "addmm",
    "convolution",
    "embedding",
    "native_batch_norm",
}
"""Operations that take no single number of the host beside tensors of the device."""


class Mixed(RuntimeError):
    """Tensors of two devices met."""


class Pretend(Tensor):
    """A tensor on the pretend device; ``inner`` has its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Pretend":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def tolist(self):
        _waits()
        return self.inner.tolist()

    def __repr__(self, *, tensor_contents=None):
        return f"Pretend({self.inner})"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextmanager
def on_pretend() -> Iterator[torch.device]:
    """Let tensors be made on the pretend device; count the waits, and what is sent, from zero."""
    WAITS.clear()
    SENT.clear()
    cell, torch.gru_cell = torch.gru_cell, _gru_cell
    try:
        with _Mode():
            yield DEVICE
    finally:
        torch.gru_cell = cell


def _where() -> str:
    frame = sys._getframe()
    while frame is not None:
        _, ours, file = frame.f_code.co_filename.partition("/src/torchemo/")
        if ours:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _waits() -> None:
    WAITS[_where()] += 1


def _run(func, args, kwargs):
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    ours = [t for t in tensors if isinstance(t, Pretend)]
    device = kwargs.get("device")
    here = device is not None and torch.device(device).type == NAME
    if here and kwargs.get("generator") is not None:
        raise RuntimeError(f"Expected a '{NAME}' generator but found 'cpu' [{_where()}]")
    if not ours and not here:
        return func(*args, **kwargs)
    away = device is not None and not here
    _check(func, args, [t for t in tensors if not isinstance(t, Pretend)], away=away)
    if here and not ours and func is aten._to_copy.default:
        SENT[args[0].dtype] += args[0].numel() * args[0].element_size()
    inner_args = _each(_unwrap, args)
    inner_kwargs = {name: _each(_unwrap, value) for name, value in kwargs.items()}
    if here:
        inner_kwargs["device"] = "cpu"
        inner_kwargs.pop("pin_memory", None)
    out = func(*inner_args, **inner_kwargs)
    if func is aten.copy_.default or (_is_in_place(func) and isinstance(args[0], Pretend)):
        return args[0]
    if func is aten._to_copy.default and away:
        return out
    out = _each(_wrap, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if ours and _is_alias(func) else out


@cache
def _is_in_place(func) -> bool:
    """Return whether an operation gives back its first tensor, with other numbers and the same shape."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    alone = written[:1] == [True] and not any(written[1:]) and len(func._schema.returns) == 1
    return alone and torch.Tag.inplace_view not in func.tags


@cache
def _is_alias(func) -> bool:
    """Return whether an operation gives back memory that it was given."""
    return any(found.alias_info is not None for found in func._schema.returns)


def _tensors(values) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in lists: operations take no deeper ones."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _each(change, value):
    """Change a value, or all in a list; as `tree_map`, which takes far longer."""
    if isinstance(value, (list, tuple)):
        return type(value)([_each(change, one) for one in value])
    return change(value)


def _check(func, args, host, *, away):
    """Refuse what CUDA refuses, and count the waits."""
    name = func.overloadpacket.__name__
    if func in _COPIES:
        if away or (func is aten.copy_.default and not isinstance(args[0], Pretend)):
            _waits()
    elif func in _INDEXING:
        if not isinstance(args[0], Pretend):
            raise Mixed(f"indices of {NAME} into a tensor of the cpu [{_where()}]")
        if any(i is not None and isinstance(i, Pretend) and i.dtype == torch.bool for i in args[1]):
            _waits()
        if len(args) > 2 and not isinstance(args[2], Pretend) and args[2].dim() > 0:
            raise Mixed(f"{name}: values of the cpu [{_where()}]")
    elif bad := [tuple(t.shape) for t in host if t.dim() > 0 or name in _STRICT]:
        raise Mixed(f"{name} of {NAME} and of the cpu, {bad} [{_where()}]")
    if func in _WAITING:
        _waits()


def _unwrap(x):
    return x.inner if isinstance(x, Pretend) else x


def _wrap(x):
    return Pretend(x) if isinstance(x, Tensor) and not isinstance(x, Pretend) else x


_plain_gru_cell = torch.gru_cell


def _gru_cell(x, h, w_ih, w_hh, b_ih=None, b_hh=None):
    """Compute a cell from its parts: devices fuse it, the CPU underneath does not."""
    if not isinstance(x, Pretend):
        return _plain_gru_cell(x, h, w_ih, w_hh, b_ih, b_hh)
    linear = torch.nn.functional.linear
    i, g = linear(x, w_ih, b_ih).chunk(3, -1), linear(h, w_hh, b_hh).chunk(3, -1)
    r, z = (i[0] + g[0]).sigmoid(), (i[1] + g[1]).sigmoid()
    n = (i[2] + r * g[2]).tanh()
    return (h - n) * z + n


# Tensors that C++ makes where no mode is active: in worker threads, of lists used as indices.
_library = torch.library.Library("aten", "IMPL")


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return Pretend(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return Pretend(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, dest, non_blocking=False):
    _unwrap(dest).copy_(_unwrap(source))
    return dest


_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
