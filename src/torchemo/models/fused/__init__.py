"""A compiled Conv-4 block: one operation, exactly differentiable twice, for one task on a CPU.

`Conv4` uses it by itself where it can. The kernels are compiled at first use; without a C compiler there is
one warning and plain torch does the work. The maths is in ``docs/speed-notes.md``.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchemo.core.allocator import keep_memory as keep_memory
from torchemo.core.errors import ConfigError
from torchemo.models.fused.compile import Status as Status
from torchemo.models.fused.compile import libraries
from torchemo.models.fused.conv_block import conv_block as conv_block
from torchemo.models.fused.kernels import BITS

__all__ = ["Status", "conv_block", "keep_memory", "plain_autograd", "require", "status", "usable"]


def status(*, bits: int = 32) -> Status:
    """Say whether the kernels are available, compiling them if that has not been tried yet."""
    return libraries(bits)[1]


def plain_autograd() -> bool:
    """Tell whether derivatives are taken by ordinary reverse-mode autograd, if at all.

    Function transforms and compilers trace or batch torch operations and cannot look into a kernel.
    """
    traced = torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()
    return not traced and forward_ad._current_level < 0


def usable(x: Tensor) -> bool:
    """Tell whether the kernels can work on ``x``: CPU, float32 or float64, plain reverse-mode autograd."""
    return _obstacle(x) is None and status(bits=BITS[x.dtype]).available


def require(x: Tensor) -> None:
    """Raise `ConfigError` unless the kernels can work on ``x``."""
    reason = _obstacle(x)
    if reason is None and not usable(x):
        reason = status(bits=BITS[x.dtype]).detail
    if reason is not None:
        raise ConfigError(
            f"the fused convolution block cannot be used: {reason}.",
            hint="Use path = 'auto' or 'reference', or install a C compiler.",
        )


def _obstacle(x: Tensor) -> str | None:
    if x.device.type != "cpu":
        return f"images are on {x.device.type}, not on the CPU"
    if x.dtype not in BITS:
        return f"images are {x.dtype}, not float32 or float64"
    if not plain_autograd():
        return "it is called inside a torch.func transform, torch.compile or forward-mode autograd"
    return None
