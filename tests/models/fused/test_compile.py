import ctypes
import stat
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torchemo.core import allocator as memory
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.tree import expand
from torchemo.models import Conv4, fused
from torchemo.models.fused import compile as build
from torchemo.models.fused import keep_memory

try:
    COMPILER = build.find_compiler()
except build.BuildError:
    pytest.skip("no C compiler", allow_module_level=True)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Sources that compile at once, and a cache of their own."""
    sources = tmp_path / "sources"
    sources.mkdir()
    visible = '__attribute__((visibility("default")))'
    code = f'#include "bits.h"\n{visible} int bits(void) {{ return BITS; }}\n'
    (sources / "conv_block.c").write_text(code)
    (sources / "bits.h").write_text("#define BITS PRECISION\n")
    monkeypatch.setattr(build, "HERE", sources)
    return tmp_path / "cache"


@pytest.fixture
def script(tmp_path):
    """Write a compiler that does what a shell line says."""

    def write(line):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


def counting(script, tmp_path):
    return script(f'echo "$@" >> {tmp_path}/log; exec {COMPILER} "$@"')


def compilations(tmp_path):
    return (tmp_path / "log").read_text().count(" -shared ")


def test_a_library_is_compiled_once_and_then_taken_from_the_cache(tiny, script, tmp_path):
    compiler = counting(script, tmp_path)
    first, path = build.load_library(compiler, tiny, bits=32)
    again, same = build.load_library(compiler, tiny, bits=32)
    assert first.bits() == again.bits() == 32
    assert path == same
    assert compilations(tmp_path) == 1
    assert stat.S_IMODE(tiny.stat().st_mode) == 0o700


def test_each_precision_source_and_compiler_has_a_library_of_its_own(tiny, script):
    paths = {build.compile_library(COMPILER, tiny, bits=bits) for bits in (32, 64)}
    (build.HERE / "bits.h").write_text("#define BITS 7\n")
    changed, path = build.load_library(COMPILER, tiny, bits=32)
    assert changed.bits() == 7
    paths.add(path)
    paths.add(build.compile_library(script(f'exec {COMPILER} -DOTHER=1 "$@"'), tiny, bits=32))
    assert len(paths) == 4


def test_a_damaged_library_is_compiled_again(tiny):
    path = build.compile_library(COMPILER, tiny, bits=64)
    path.write_bytes(path.read_bytes()[:100])
    library, _ = build.load_library(COMPILER, tiny, bits=64)
    assert library.bits() == 64


def run_alone(module, code, *arguments):
    """Run code in a new process on one module of the package, without waiting for torch."""
    load = (
        "import sys, importlib.util as u;"
        "spec = u.spec_from_file_location('module', sys.argv[1]); module = u.module_from_spec(spec);"
        "sys.modules['module'] = module; spec.loader.exec_module(module)\n"
    )
    command = [sys.executable, "-c", load + code, module.__file__, *map(str, arguments)]
    return subprocess.check_output(command, text=True)


def test_many_at_once_leave_one_library_and_nothing_else(tiny):
    code = """
from pathlib import Path
module.HERE = Path(sys.argv[2])
print(module.load_library(sys.argv[4], Path(sys.argv[3]), bits=32)[0].bits())
"""
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(run_alone, build, code, build.HERE, tiny, COMPILER) for _ in range(4)]
    assert [f.result() for f in found] == ["32\n"] * 4
    assert [p.suffix for p in tiny.iterdir()] == [".so"]


def test_a_cache_that_others_can_write_is_not_used(tiny):
    tiny.mkdir()
    tiny.chmod(0o777)
    with pytest.raises(PermissionError, match="by others"):
        build.compile_library(COMPILER, tiny, bits=32)
    library, status = build.attempt((COMPILER,), tiny)
    assert library.bits() == 32
    assert status.available
    assert "this process" in status.detail
    assert not list(tiny.iterdir())


def test_a_cache_that_cannot_be_made_is_done_without(tiny):
    tiny.write_text("a file where the directory should be")
    library, status = build.attempt((COMPILER,), tiny, bits=64)
    assert library.bits() == 64
    assert "this process" in status.detail


def test_the_cache_follows_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_directory() == tmp_path / "torchemo" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_directory() == tmp_path / "home" / ".cache" / "torchemo" / "kernels"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("echo broken >&2; exit 1", "does not work"),
        ('case "$*" in *-shared*) echo no disk >&2; exit 1;; esac', "no disk"),
        ("true", "does not load"),
    ],
)
def test_a_compiler_that_fails_is_told_in_one_line(tiny, script, line, word):
    library, status = build.attempt((script(line),), tiny)
    assert library is None
    assert not status.available
    assert "\n" not in status.detail
    assert word in status.detail


def test_no_compiler_is_told_by_name(tiny):
    library, status = build.attempt(("no-such-compiler",), tiny)
    assert library is None
    assert status.detail == "no C compiler found (looked for no-such-compiler)"
    assert status.compiler is None


@pytest.fixture
def without_compiler(monkeypatch):
    """A process in which no library has been found yet and none can be."""
    nothing = build.Libraries()
    monkeypatch.setattr(build, "attempt", lambda **_: (None, build.Status(False, "no compiler")))
    monkeypatch.setattr(fused, "libraries", nothing)
    return nothing


def test_without_a_compiler_there_is_one_warning_and_torch_does_the_work(without_compiler):
    model = Conv4(3, image_size=16, filters=8)
    params = expand(model.init(generator_for(0)), 1)
    x = torch.rand(1, 4, 3, 16, 16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outs = [model(params, x) for _ in range(3)]
        model({n: p.double() for n, p in params.items()}, x.double())
    assert [str(w.message) for w in told] == [
        "the fused convolution block is not available, plain torch is used: no compiler"
    ]
    reference = Conv4(3, image_size=16, filters=8, path="reference")(params, x)
    assert all(torch.equal(out, reference) for out in outs)
    assert fused.status() == build.Status(False, "no compiler")


def test_without_a_compiler_the_fused_path_is_refused(without_compiler):
    model = Conv4(3, image_size=16, filters=8, path="fused")
    params = expand(model.init(generator_for(0)), 1)
    with (
        pytest.warns(RuntimeWarning, match="no compiler"),
        pytest.raises(ConfigError, match="cannot be used: no compiler"),
    ):
        model(params, torch.rand(1, 4, 3, 16, 16))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_kept_memory_is_not_given_back():
    code = """
import resource
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(80 * 2**20)[::4096] = b"x" * 20480
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fresh = [faults(), faults()]
assert module.keep_memory()
faults()
print(min(fresh) > 1000, faults() < 100)
"""
    assert run_alone(memory, code) == "True True\n"


def test_memory_is_only_kept_where_the_c_library_knows_how(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_memory() is False
