"""Keep freed memory in the process: fresh pages cost more than the arithmetic that fills them."""

import ctypes
import os
import sys

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LIMIT = 2**31 - 1

SWITCH = "TORCHEMO_KEEP_MEMORY"
"""Set to 0, this variable tells commands to leave the allocator alone."""


def wanted() -> bool:
    """Tell whether commands are to call `keep_memory`; the library itself never does."""
    return os.environ.get(SWITCH) != "0"


def keep_memory() -> bool:
    """Ask the C library to serve large blocks from its heap and never to give the heap back.

    By default glibc maps every block above 32 MB anew and unmaps it when it is freed, so each step of
    training pays for zeroing its memory again. The process then keeps its peak memory until it ends. This
    changes the whole process and cannot be undone; commands call it, importing the library does not.

    Returns:
        Whether the C library took it; False where it is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Blocks above the mmap threshold are mapped one by one: raise it, and the trim threshold with it.
    return bool(mallopt(_MMAP_THRESHOLD, 2**30) and mallopt(_TRIM_THRESHOLD, _LIMIT))
