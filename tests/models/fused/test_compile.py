import ctypes
import os
import stat
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torchemo.core import allocator as memory
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.tree import expand
from torchemo.models import Conv4, fused
from torchemo.models.fused import compile as build
from torchemo.models.fused import keep_memory, vault

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
    home = tmp_path / "home" / ".cache" / "torchemo" / "kernels"
    assert build.cache_directory() == home
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/to/anything")
    assert build.cache_directory() == home


def test_a_flipped_bit_is_never_loaded(tiny):
    path = build.compile_library(COMPILER, tiny, bits=64)
    good = path.read_bytes()
    for at in (0, 100, len(good) // 2, len(good) - 1):
        flipped = bytearray(good)
        flipped[at] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(OSError, match="damaged"):
            vault.load(path)
        library, again = build.load_library(COMPILER, tiny, bits=64)
        assert library.bits() == 64
        assert again.read_bytes() == good


def test_every_truncation_is_compiled_again(tiny):
    """Loading a library that is too short kills the process: this test would not end."""
    path = build.compile_library(COMPILER, tiny, bits=64)
    good = path.read_bytes()
    for size in (0, 1, 64, 4096, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        assert build.load_library(COMPILER, tiny, bits=64)[0].bits() == 64


def test_two_libraries_loaded_one_after_the_other_are_two(tiny):
    found = [build.load_library(COMPILER, tiny, bits=bits)[0] for bits in (32, 64, 32)]
    assert [library.bits() for library in found] == [32, 64, 32]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_cache_is_closed_to_others_whatever_the_umask(tiny, umask):
    before = os.umask(umask)
    try:
        path = build.compile_library(COMPILER, tiny / "torchemo" / "kernels", bits=32)
    finally:
        os.umask(before)
    for place in (path, path.parent, path.parent.parent, tiny):
        assert not place.stat().st_mode & 0o022, place


def test_a_cache_whose_parent_others_can_write_is_not_used(tiny):
    cache = tiny / "torchemo" / "kernels"
    cache.mkdir(parents=True, mode=0o700)
    tiny.chmod(0o777)
    library, status = build.attempt((COMPILER,), cache)
    assert library.bits() == 32
    assert "can be written by others" in status.detail
    assert not list(cache.iterdir())
    tiny.chmod(0o1777)  # as /tmp: nobody can rename what is another's
    assert build.attempt((COMPILER,), cache)[1].detail.startswith(str(cache))


def test_a_relative_cache_is_not_used(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "relative" in build.attempt((COMPILER,), Path("cache"))[1].detail
    assert not tiny.exists()


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away"
)
def test_the_library_of_another_user_is_not_loaded(tiny):
    path = build.compile_library(COMPILER, tiny, bits=32)
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match="by others"):
        vault.load(path)
    library, again = build.load_library(COMPILER, tiny, bits=32)
    assert library.bits() == 32
    assert again.stat().st_uid == 0


def test_a_library_that_others_can_write_or_a_link_is_not_loaded(tiny, tmp_path):
    path = build.compile_library(COMPILER, tiny, bits=32)
    path.chmod(0o722)
    with pytest.raises(PermissionError, match="by others"):
        vault.load(path)
    path.chmod(0o700)
    elsewhere = tmp_path / path.name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
        vault.load(path)
    assert build.load_library(COMPILER, tiny, bits=32)[0].bits() == 32


def test_a_foreign_library_under_our_key_is_not_loaded(tiny):
    path = build.compile_library(COMPILER, tiny, bits=32)
    foreign = build.compile_library(COMPILER, tiny, bits=64).read_bytes()
    path.write_bytes(foreign)
    assert build.load_library(COMPILER, tiny, bits=32)[0].bits() == 32


@pytest.mark.parametrize("name", ["CPATH", "C_INCLUDE_PATH"])
def test_headers_of_the_environment_are_not_compiled_in(tiny, tmp_path, monkeypatch, name):
    (build.HERE / "conv_block.c").write_text(
        '#include <bits.h>\n__attribute__((visibility("default"))) int bits(void) { return 7; }\n'
    )
    (tmp_path / "bits.h").write_text("#define poison\n")
    monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(build.BuildError, match=r"bits\.h"):
        build.compile_library(COMPILER, tiny, bits=32)


def test_a_compiler_of_the_current_folder_is_not_used(tmp_path, monkeypatch, script):
    script("exit 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", ".")
    with pytest.raises(build.BuildError, match="no C compiler"):
        build.find_compiler(("compiler",))


def test_a_library_is_on_the_disk_before_it_has_its_name(tiny, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, real=real, name=name: (done.append(name), real(*a))[1]
        )
    build.compile_library(COMPILER, tiny, bits=32)
    assert done == ["fsync", "replace", "fsync"]


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
