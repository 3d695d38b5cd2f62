"""Compile the kernels with the system's C compiler on first use, keep the library, load it by ctypes.

The library is stored under the user's cache directory in a name made of everything it depends on: the
sources, the flags, and what the compiler predefines for this processor (its version and instruction
sets among it), and kept by `torchemo.models.fused.vault`, which nobody else can fill. It is published by
rename, so processes that compile at once do not meet. Each precision is a library of its own, since hardly
anyone needs both.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torchemo.models.fused import vault

HERE = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-w",
)
# Compilers for ARM know the second spelling only; the last resort is a library for any processor.
TUNING = (("-march=native",), ("-mcpu=native",), ())
SECONDS = 300
_STEERING = frozenset(
    (
        *("CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
        *("CCC_OVERRIDE_OPTIONS", "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "LD_RUN_PATH"),
    )
)
"""Variables by which compilers take further files and options."""


class BuildError(Exception):
    """Why there is no library."""


@final
@dataclass(frozen=True)
class Status:
    """Whether the fused kernels can be used, and why not; for ``doctor``.

    Attributes:
        available: They can.
        detail: Where the library lies, or the reason there is none.
        compiler: The compiler that was found.
        build: Digest of sources, flags, compiler and processor: equal builds compute equal bits.
    """

    available: bool
    detail: str
    compiler: str | None = None
    build: str | None = None


def find_compiler(names: Sequence[str] = COMPILERS) -> str:
    """Return the path of the first C compiler there is."""
    for name in names:
        found = shutil.which(name)
        if found is not None and os.path.isabs(found):  # not one of the current folder
            return found
    raise BuildError(f"no C compiler found (looked for {', '.join(names)})")


def cache_directory() -> Path:
    """Return the user's cache directory for compiled kernels (``XDG_CACHE_HOME`` or ``~/.cache``)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path would load what lies in the current folder; the XDG rules ignore it, too.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "torchemo" / "kernels"


def compile_library(compiler: str, cache: Path, *, bits: int) -> Path:
    """Return the compiled library, from ``cache`` if it has been compiled before and is sound."""
    cache = vault.private_folder(cache)
    tuning, described = _tuning(compiler)
    flags = (*FLAGS, *tuning, f"-DPRECISION={bits}")
    key = _key(described, flags)
    found = vault.find(cache, key)
    if found is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as folder:
        made = Path(folder) / "library"
        _run([compiler, *flags, str(HERE / "conv_block.c"), "-o", str(made), "-lm"])
        if not made.is_file():
            raise BuildError("the compiled library does not load: there is none")
        return vault.keep(cache, key, made.read_bytes())


def load_library(compiler: str, cache: Path, *, bits: int) -> tuple[ctypes.CDLL, Path]:
    """Compile if needed and load."""
    path = compile_library(compiler, cache, bits=bits)
    try:
        return vault.load(path), path
    except OSError as error:
        path.unlink(missing_ok=True)
        raise BuildError(f"the compiled library does not load: {error}") from error


def attempt(
    names: Sequence[str] = COMPILERS, cache: Path | None = None, *, bits: int = 32
) -> tuple[ctypes.CDLL | None, Status]:
    """Try to get a library; where the cache cannot be used, compile for this process alone."""
    compiler = None
    try:
        compiler = find_compiler(names)
        try:
            found, path = load_library(compiler, cache or cache_directory(), bits=bits)
            return found, Status(True, str(path), compiler, _build(path))
        except OSError as reason:
            why = _one_line(reason)
            with tempfile.TemporaryDirectory(prefix="torchemo-") as private:
                found, path = load_library(compiler, Path(private), bits=bits)
            detail = f"compiled for this process: {why}"
            return found, Status(True, detail, compiler, _build(path))
    except (BuildError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, Status(False, _one_line(error), compiler)


@final
class Libraries:
    """The libraries of this process, each sought at the first use by any thread.

    The first failure is told in one warning; after it plain torch is used.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, tuple[ctypes.CDLL | None, Status]] = {}

    def __call__(self, bits: int) -> tuple[ctypes.CDLL | None, Status]:
        """Return the library of a precision, or None, and its status."""
        if bits not in self._found:
            with self._lock:
                self._seek(bits)
        return self._found[bits]

    def _seek(self, bits: int) -> None:
        if bits in self._found:
            return
        quiet = any(library is None for library, _ in self._found.values())
        library, status = self._found[bits] = attempt(bits=bits)
        if library is None and not quiet:
            warnings.warn(
                "the fused convolution block is not available, plain torch is used:"
                f" {status.detail}",
                RuntimeWarning,
                stacklevel=2,
            )


libraries = Libraries()
"""The one thing this package keeps for the life of the process."""


def _tuning(compiler: str) -> tuple[tuple[str, ...], str]:
    """Choose the tuning flags the compiler knows; describe compiler and processor by its macros."""
    for tuning in TUNING:
        try:
            return tuning, _run([compiler, *tuning, "-dM", "-E", "-x", "c", os.devnull])
        except BuildError:
            continue
    raise BuildError(f"{compiler} does not work")


def _build(path: Path) -> str:
    return path.stem.partition("-")[0]


def _key(described: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256(repr((flags, described)).encode())
    for source in sorted(HERE.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(  # noqa: S603 -- a fixed command line: the system's compiler on our sources
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=_environment()
    )
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Leave out what would put other files into the library than those its key is made of."""
    return {name: value for name, value in os.environ.items() if name not in _STEERING}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
