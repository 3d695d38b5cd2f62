"""Check this machine: versions, threads, disk, extras, and whether its gradients are right."""

import os
import platform
import shutil
import sys
from importlib import util
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchemo.core.allocator import SWITCH, wanted
from torchemo.core.losses import cross_entropy
from torchemo.core.rng import generator_for
from torchemo.core.tree import flatten
from torchemo.core.types import Batch, Episode, Params
from torchemo.core.workers import usable_cores
from torchemo.learners.gradient.inner import SGD
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.models import Conv4, fused
from torchemo.runs.environment import environment
from torchemo.runs.storage.durable import megabytes
from torchemo.training.predict import predict
from torchemo.training.step import outer_step

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 4)
FREE_BYTES = 1 << 30
"""Disk space below which a run may not be able to save."""

EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb", "ann": "faiss"}
"""Optional parts: what to install, and the module that is then there."""

EQUAL, NEAR = 1e-12, 1e-6
"""Largest relative difference between two ways of computing, and from finite differences."""

COMPILED = 1e-10
"""Largest relative difference between the compiled block and torch operations."""

STEP = 1e-5
"""Half the length of a finite difference: its error is of the order of the square."""

SMALL = 1e-3
"""A tensor's difference is relative to its own gradient, or to this share of the whole one if larger: a
bias before a normalisation has no gradient at all."""


class Check(NamedTuple):
    """One thing that was looked at; a ``note`` is no reason to worry."""

    name: str
    state: Literal["ok", "note", "bad"]
    detail: str


class Diagnosis(NamedTuple):
    """Everything that was looked at, and the environment it was found in."""

    checks: tuple[Check, ...]
    environment: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether nothing is bad."""
        return all(check.state != "bad" for check in self.checks)


class GradientErrors(NamedTuple):
    """Largest relative differences over the tensors of a network, and the tensor with the largest.

    Attributes:
        batched: Between the tasks in one call and the same tasks one after another.
        finite: Between the meta-gradient and finite differences of the outer loss.
    """

    batched: tuple[float, str]
    finite: tuple[float, str]


def diagnose(folder: Path) -> Diagnosis:
    """Look this machine over."""
    checks = (
        _python(),
        _torch(),
        _threads(),
        _convolutions(),
        _allocator(),
        _disk(folder),
        *_extras(),
        *_gradients(),
    )
    return Diagnosis(checks, environment())


def gradient_errors() -> GradientErrors:
    """Compare the meta-gradient of a tiny Conv-4, in float64, computed in three ways.

    Scale and shift of its normalisation are adapted too: with torch's normalisation kernel under ``vmap``
    this is the case whose meta-gradients are silently wrong. Here every network is written for the task
    axis and takes no gradient through ``vmap``.
    """
    model = Conv4(2, image_size=16, filters=2, activation="tanh", downsample="stride")
    learner = MAML(InnerLoop(model, rule=SGD(lr=0.4), steps=2, adapt_bn=True))
    params = {n: p.double() for n, p in learner.init(generator_for(0, "doctor")).items()}
    episode = _episode()
    loop = outer_step(learner, params, episode).gradients
    together = outer_step(learner, params, episode, batched=True).gradients
    least = SMALL * float(flatten({n: g[None] for n, g in loop.items()}).norm())
    size = {n: max(float(g.norm()), least) for n, g in loop.items()}
    return GradientErrors(
        _largest({n: float((together[n] - g).norm()) / size[n] for n, g in loop.items()}),
        _largest({n: _off(learner, params, episode, g, n) / size[n] for n, g in loop.items()}),
    )


def compiled_error() -> float:
    """Compare the meta-gradient by the compiled block with that by torch operations, in float64.

    The block is compiled on the user's machine, by a compiler nobody has tested.
    """
    found = []
    for path in ("fused", "reference"):
        model = Conv4(2, image_size=16, filters=2, path=path)
        learner = MAML(InnerLoop(model, rule=SGD(lr=0.4), steps=2, adapt_bn=True))
        params = {n: p.double() for n, p in learner.init(generator_for(0, "doctor")).items()}
        gradients = outer_step(learner, params, _episode()).gradients
        found.append(flatten({n: g[None] for n, g in gradients.items()}))
    return float((found[0] - found[1]).norm() / found[1].norm())


def _episode() -> Episode:
    generator = generator_for(0, "doctor", "tasks")

    def batch(examples: int) -> Batch:
        x = torch.rand(2, examples, 3, 16, 16, generator=generator, dtype=torch.float64)
        return Batch(x, torch.arange(examples).repeat(2, 1) % 2)

    return Episode(batch(2), batch(4))


def _off(learner: MAML, params: Params, episode: Episode, gradient: Tensor, name: str) -> float:
    """Return how far the slope of the outer loss along a random direction is from its gradient's."""
    generator = generator_for(0, "doctor", name)
    along = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
    along /= along.norm()

    def loss(t: float) -> float:
        moved = {**params, name: params[name] + t * along}
        answer = predict(learner, moved, episode, batched=True).outputs[-1]
        return float(cross_entropy(answer, episode.query.y).mean())

    slope = (loss(STEP) - loss(-STEP)) / (2 * STEP)
    return abs(slope - float((gradient * along).sum()))


def _largest(errors: dict[str, float]) -> tuple[float, str]:
    name = max(errors, key=lambda n: errors[n])
    return errors[name], name


# -- checks --------------------------------------------------------------------------------------


def _python() -> Check:
    least = ".".join(map(str, OLDEST_PYTHON))
    state: Literal["ok", "bad"] = "ok" if sys.version_info[:2] >= OLDEST_PYTHON else "bad"
    return Check("python", state, f"{platform.python_version()} (needs {least} or newer)")


def _torch() -> Check:
    version = str(torch.__version__)
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    build = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "CPU"
    capability = torch.backends.cpu.get_cpu_capability()
    state: Literal["ok", "bad"] = "ok" if parts >= OLDEST_TORCH else "bad"
    return Check("torch", state, f"{version}, {build}, {capability}")


def _threads() -> Check:
    threads = torch.get_num_threads()
    cores = usable_cores()
    detail = f"{threads} threads on {cores} cores"
    if threads > cores:
        return Check("threads", "note", f"{detail}; set OMP_NUM_THREADS={cores}")
    return Check("threads", "ok", detail)


def _convolutions() -> Check:
    found = fused.status()
    if found.available and fused.status(bits=64).available:
        error = compiled_error()
        fit = f"meta-gradient differs from torch's by {error:.0e}, at most {COMPILED:.0e}"
        state: Literal["ok", "bad"] = "ok" if error <= COMPILED else "bad"
        return Check("convolutions", state, f"compiled block ({found.detail}); {fit}")
    detail = f"plain torch, several times slower: {found.detail}"
    fix = "install a C compiler (gcc or clang)" if found.compiler is None else "see the message"
    return Check("convolutions", "note", f"{detail}; {fix}")


def _allocator() -> Check:
    if not sys.platform.startswith("linux"):
        return Check("allocator", "note", "not glibc: it decides itself what memory it keeps")
    if not wanted():
        return Check("allocator", "note", f"{SWITCH}=0: commands leave it alone and are slower")
    detail = f"commands keep freed memory (off: --release-memory or {SWITCH}=0)"
    return Check("allocator", "ok", f"{detail}; importing torchemo sets nothing")


def _disk(folder: Path) -> Check:
    place = next((p for p in (folder, *folder.absolute().parents) if p.is_dir()), Path("/"))
    if not os.access(place, os.W_OK):
        return Check("disk", "bad", f"{place} may not be written")
    free = shutil.disk_usage(place).free
    state: Literal["ok", "note"] = "ok" if free >= FREE_BYTES else "note"
    return Check("disk", state, f"{megabytes(free)} free")


def _extras() -> list[Check]:
    return [
        Check(extra, "ok", "installed")
        if util.find_spec(module) is not None
        else Check(extra, "note", f"not installed; pip install torchemo[{extra}]")
        for extra, module in EXTRAS.items()
    ]


def _gradients() -> list[Check]:
    found = gradient_errors()
    rows = (
        ("tasks together = one by one", found.batched, EQUAL),
        ("meta-gradient = finite differences", found.finite, NEAR),
    )
    return [
        Check(
            name,
            "ok" if error <= limit else "bad",  # NaN is not below anything
            f"largest relative difference {error:.1e} ({tensor}), at most {limit:.0e}",
        )
        for name, (error, tensor), limit in rows
    ]
