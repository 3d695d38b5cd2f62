"""One outer step: ours on its paths, and everybody else's, on the same tasks."""

import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchemo.lab.bench.clock import Variant, fastest, interleave, rows, timed
from torchemo.lab.bench.measures.peers import Step, peer_makers
from torchemo.lab.bench.measures.work import Work
from torchemo.learners import LEARNERS
from torchemo.training.step import outer_step

PATHS: tuple[Literal["fused", "reference"], ...] = ("fused", "reference")
DEEP = ("hvm",)
"""Learners that read maps of several depths, which the compiled block does not give."""
OURS = "torchemo, "
CHECKED = {"size": 16, "n_query": 2, "tasks": 2, "steps": 2, "filters": 8}
"""Work small enough for float64, to see that everybody computes the same."""


def our_step(
    work: Work,
    path: Literal["auto", "fused", "reference"],
    *,
    workers: int = 1,
    batched: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Return our outer step."""
    learner, episode = work.make_learner(path), work.episode(dtype)
    known = learner.init(torch.Generator().manual_seed(0))
    params = {**{n: p.to(dtype) for n, p in known.items()}, **work.params(dtype)}
    params = {name: params[name] for name in known}

    def step() -> list[Tensor]:
        found = outer_step(learner, params, episode, batched=batched, workers=workers)
        return list(found.gradients.values())

    return step


def steps_of(
    work: Work, *, workers: int, dtype: torch.dtype = torch.float32, only: Sequence[str] = ()
) -> dict[str, Variant]:
    """Return every variant of the step; ours has task workers where peers have threads in operations."""
    makers: dict[str, Callable[[], Variant]] = {
        f"{OURS}{path}": lambda path=path: Variant(  # type: ignore[misc]
            our_step(work, path, workers=workers, dtype=dtype)
        )
        for path in PATHS
    }
    for name, make in peer_makers(work, dtype).items():
        makers[name] = lambda make=make: Variant(make(), workers)  # type: ignore[misc]
    return {name: make() for name, make in makers.items() if not only or name in only}


def agreement(work: Work) -> dict[str, float]:
    """Compare everybody's gradient with the plain loop's, in float64 on small tasks.

    In float32 near ties of pooling and ReLU fall differently for everybody.
    """
    small = work.but(**CHECKED)
    flat = {
        name: torch.cat([g.detach().flatten() for g in variant.run()])  # type: ignore[attr-defined]
        for name, variant in steps_of(small, workers=1, dtype=torch.float64).items()
    }
    base = flat["plain loop"]
    return {name: float((g - base).norm() / base.norm()) for name, g in flat.items()}


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time one case. The request holds ``work``, ``workers``, ``repeats`` and perhaps ``only``."""
    work, workers = Work(**request["work"]), request["workers"]
    variants = steps_of(work, workers=workers, only=request.get("only", ()))
    same = agreement(work)
    times = interleave(variants, repeats=request["repeats"])
    peers = [name for name in variants if not name.startswith(OURS)]
    best = fastest(times, peers)
    return {
        "best_peer": best,
        "gradient_difference_float64": {n: same[n] for n in variants},
        "rows": rows(times, base=best),
    }


def peak(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one variant a few times; the resident memory at its largest, before and with it, in MB."""
    work, workers, name = Work(**request["work"]), request["workers"], request["variant"]
    variant = steps_of(work, workers=workers, only=[name])[name]
    torch.set_num_threads(variant.threads)
    before = _peak_mb()
    for _ in range(request["repeats"]):
        variant.run()
    return {"before_mb": before, "peak_mb": _peak_mb()}


def learners(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time every learner on our paths, one thread; the plain loop where it is written for it."""
    work = Work(**request["work"])
    found: dict[str, Any] = {}
    for name in LEARNERS:
        own = work.but(learner=name, order=1 if name in ("fomaml", "reptile") else work.order)
        paths = PATHS[1:] if name in DEEP else PATHS
        variants = {f"{OURS}{path}": Variant(our_step(own, path)) for path in paths}
        if name in ("maml", "fomaml", "anil"):
            variants["plain loop"] = Variant(peer_makers(own)["plain loop"]())
        times = interleave(variants, repeats=request["repeats"])
        base = "plain loop" if "plain loop" in variants else f"{OURS}reference"
        found[name] = {"base": base, "rows": rows(times, base=base)}
    return {"learners": found}


def against_size(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time ours and the plain loop while one quantity of the work grows."""
    work, quantity = Work(**request["work"]), request["quantity"]
    points = []
    for value in request["values"]:
        own = work.but(**{quantity: value})
        variants = {
            f"{OURS}fused": Variant(our_step(own, "fused")),
            "plain loop": Variant(peer_makers(own)["plain loop"]()),
        }
        times = interleave(variants, repeats=request["repeats"])
        points.append({"value": value, "rows": rows(times, base="plain loop")})
    return {"quantity": quantity, "points": points}


def seconds(work: Work) -> float:
    """Time one of our steps, for whoever wants its share."""
    step = our_step(work, "auto")
    step()
    return timed(step).wall


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
