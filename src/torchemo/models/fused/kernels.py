"""Call the compiled kernels on tensors. ctypes releases the interpreter lock while one runs."""

import ctypes
import threading

import torch
from torch import Tensor

from torchemo.models.fused.compile import libraries

BITS = {torch.float32: 32, torch.float64: 64}
"""The precisions there are kernels for."""

_local = threading.local()


def shape_of(x: Tensor, weight: Tensor) -> ctypes.Array[ctypes.c_long]:
    """Return images, height, width, channels in and out as the kernels read them."""
    n, channels, height, width = x.shape
    return (ctypes.c_long * 5)(n, height, width, channels, weight.shape[0])


def call(name: str, shape: ctypes.Array[ctypes.c_long], *arguments: Tensor | float | None) -> None:
    """Run ``name(shape, *arguments, workspace)``; None is a null pointer.

    The precision is that of the first tensor. Tensors must be dense in the layout the kernel expects.
    """
    first = next(a for a in arguments if isinstance(a, Tensor))
    library, status = libraries(BITS[first.dtype])
    if library is None:
        raise RuntimeError(f"the fused convolution block is not available: {status.detail}")
    kernel = getattr(library, name)
    if kernel.argtypes is None:
        kinds = (ctypes.c_double if isinstance(a, float) else ctypes.c_void_p for a in arguments)
        kernel.argtypes = [ctypes.c_void_p, *kinds, ctypes.c_void_p]
        kernel.restype = None
    work = _workspace(_room(library, f"{name.partition('_')[0]}_room", shape))
    native = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    kernel(shape, *native, work.data_ptr())


def channels_last(*shape: int, like: Tensor) -> Tensor:
    """Allocate maps ``[n, channels, height, width]`` with the channels innermost."""
    return torch.empty(shape, dtype=like.dtype, device="cpu", memory_format=torch.channels_last)


def dense_maps(x: Tensor | None) -> Tensor | None:
    """Return maps with the channels innermost, copied only if they are not so already."""
    return None if x is None else x.contiguous(memory_format=torch.channels_last)


def dense(x: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor."""
    return None if x is None else x.contiguous()


def _room(library: ctypes.CDLL, name: str, shape: ctypes.Array[ctypes.c_long]) -> int:
    room = getattr(library, name)
    room.restype = ctypes.c_long
    return int(room(shape))


def _workspace(size: int) -> Tensor:
    """Return this thread's scratch memory: fresh pages are dear, and threads must not share one."""
    work: Tensor | None = getattr(_local, "work", None)
    if work is None or work.numel() < size:
        work = _local.work = torch.empty(size, dtype=torch.uint8, device="cpu")
    return work
