"""What `torchemo bench` measures: the cases of each sub-command, in full and quick."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import util
from typing import Any, NamedTuple

from torchemo.config.machine import Machine
from torchemo.lab.bench.sizes import Asked

SMALL = {"size": 16, "filters": 8, "tasks": 2, "steps": 2, "n_query": 2}
"""Work of a quick look."""

FEW = ("torchemo, fused", "plain loop", "TorchOpt")
"""Variants of a case that would take too long with all of them."""


class Case(NamedTuple):
    """One measurement.

    Attributes:
        measurement: Which function measures it, see `torchemo.lab.bench.process`.
        request: Its argument.
        keep: Whether the C library keeps freed memory, for every variant alike.
        processes: Fresh processes, of which the one with the median peak of memory counts.
    """

    measurement: str
    request: dict[str, Any]
    keep: bool = True
    processes: int = 1


def step_plan(*, quick: bool) -> dict[str, Case]:
    """Steps against peers, at peak memory, of every learner, against size, and of whole runs."""
    cases: dict[str, Case] = {}
    sizes = (16,) if quick else (84, 28)
    for order in (2, 1):
        for size in sizes:
            for workers in (1,) if quick else (1, 2):
                work = _work(quick, size=size, order=order)
                # The longest steps take seconds each and vary little.
                repeats = 2 if quick else 3 if size == 84 and order == 2 else 7
                request = {"work": work, "workers": workers, "repeats": repeats}
                cases[f"maml, order {order}, {size} px, {workers} thread(s)"] = Case(
                    "step", request
                )
    first = {"work": _work(quick, size=sizes[0]), "workers": 1, "repeats": 3, "only": FEW}
    name = f"maml, order 2, {sizes[0]} px, 1 thread(s), default allocator"
    cases[name] = Case("step", first, keep=False)
    five = _work(quick, size=sizes[0], n_shot=5, tasks=1)
    cases[f"maml, order 2, {sizes[0]} px, 1 thread(s), 5-shot, 1 task"] = Case(
        "step", {"work": five, "workers": 1, "repeats": 2, "only": FEW}
    )
    anil = {"work": _work(quick, size=sizes[0], learner="anil"), "workers": 1, "repeats": 3}
    cases[f"anil, order 2, {sizes[0]} px, 1 thread(s)"] = Case("step", anil)
    return {
        **cases,
        **_peaks(quick),
        **_learners(quick),
        **_family(quick),
        **_sizes(quick),
        **_training(quick),
    }


def _peaks(quick: bool) -> dict[str, Case]:
    work = _work(quick, size=16 if quick else 84)
    names = ("torchemo, fused", "torchemo, reference", "plain loop", "higher", "TorchOpt")
    return {
        f"peak memory, 2 threads, {name}": Case(
            "peak",
            {"work": work, "workers": 2, "repeats": 2, "variant": name},
            keep=False,
            # When two workers reach their peaks is a matter of chance.
            processes=1 if quick else 5,
        )
        for name in (names[:1] if quick else names)
    }


def _learners(quick: bool) -> dict[str, Case]:
    request = {"work": _work(quick, size=16 if quick else 28), "repeats": 2}
    return {"learners": Case("learners", request)}


def _family(quick: bool) -> dict[str, Case]:
    learners = ("arml", "hsml", "tsa-maml", "bmg", "musml")
    presets = [name for base in ("maml", *learners) for name in (base, f"{base}-offsets-joint")]
    if quick:
        tiny = ["model.filters=2", "data.image_size=16", "data.n_query=1", "learner.steps=1"]
        return {"methods, quick": _methods(presets[:4], tiny, repeats=1)}
    others = ("anil", "anil-offsets-joint", "meta-sgd", "meta-sgd-offsets-joint")
    studied = [*presets, *others]
    small = ["model.filters=16", "data.image_size=32", "data.n_query=5"]
    return {
        "methods, 84 px, published sizes": _methods(
            presets, ["data.image_size=84"], repeats=5, published=True
        ),
        "methods, 32 px, as studied": _methods(studied, small, repeats=11),
    }


def _methods(
    presets: list[str], options: list[str], *, repeats: int, published: bool = False
) -> Case:
    request = {"presets": presets, "options": options, "repeats": repeats, "published": published}
    return Case("family", request)


def _sizes(quick: bool) -> dict[str, Case]:
    grid: dict[str, tuple[int, ...]] = {
        "steps": (1, 2) if quick else (1, 2, 5, 10),
        "tasks": (1, 2) if quick else (1, 4, 16),
        "n_shot": (1, 2) if quick else (1, 5, 10),
        "filters": (4, 8) if quick else (16, 32, 64),
    }
    work = _work(quick, size=16 if quick else 28)
    return {
        f"against {quantity}": Case(
            "sizes", {"work": work, "quantity": quantity, "values": values, "repeats": 2}
        )
        for quantity, values in grid.items()
    }


def _training(quick: bool) -> dict[str, Case]:
    grid = ((16, 1),) if quick else ((28, 2), (32, 2))
    return {
        f"training maml, {size} px, {workers} worker(s)": Case(
            "training",
            {
                "preset": "maml",
                "size": size,
                "workers": workers,
                "steps": 2 if quick else 5,
                "repeats": 1 if quick else 3,
            },
        )
        for size, workers in grid
    }


def place_plan(machine: Machine, *, quick: bool) -> dict[str, Case]:
    """Outer steps of three presets at another place than the CPU in float32, against that."""
    presets, size = ("maml", "maml-emo-paper", "maml-offsets"), 16 if quick else 84
    how = {
        "size": size,
        "steps": 2 if quick else 5,
        "repeats": 1 if quick else 3,
        **asdict(machine),
    }
    return {
        f"{name}, {size} px, {machine.device}, {machine.precision}": Case(
            "place", {"preset": name, **how}
        )
        for name in (presets[:1] if quick else presets)
    }


def memory_plan(*, quick: bool) -> dict[str, Case]:
    """Shares of the step, verbs alone, search and writes against the number of slots."""
    size = 16 if quick else 84
    # Scales and shifts are not adapted, as in the presets: there are no peers to agree with here.
    work = _work(quick, size=size, adapt_bn=False)
    repeats = 2 if quick else 5
    return {
        "shares of the step": Case(
            "shares",
            {
                "work": work,
                "repeats": repeats,
                "small": 16,
                "small_repeats": 2 if quick else 25,
            },
        ),
        "verbs": Case(
            "verbs",
            {
                "work": work,
                "repeats": repeats,
                "k": [1, 20] if quick else [1, 5, 20, 50, 100],
                "parameters": [1000] if quick else [1000, 10_000, 100_000, 1_000_000],
            },
        ),
        "search": Case("search", _search(quick)),
        "values in mapped files": Case(
            "mapped", {"slots": 1000 if quick else 100_000, "numbers": 4096}
        ),
    }


def _search(quick: bool) -> dict[str, Any]:
    slots = [10, 100, 1000] if quick else [10, 100, 1000, 10_000, 100_000, 1_000_000]
    recall = [("exact", "clusters", slots)]
    if util.find_spec("faiss") is not None:
        large = [10_000] if quick else [10_000, 100_000, 1_000_000]
        recall += [("approximate", "clusters", large), ("approximate", "uniform", large[:2])]
    return {"recall": recall, "remember": slots, "repeats": 2 if quick else 3}


def data_plan(*, quick: bool) -> dict[str, Case]:
    """Embedded tasks; a packed set as a share of a step; packing; a memory map larger than the cache."""
    cases = [("procedural", 16, 1)]
    if not quick:
        cases = [("procedural", s, k) for s in (28, 84) for k in (1, 5)]
        cases.append(("regression:hsml4", 28, 10))
    size = 16 if quick else 84
    work = _work(quick, size=size, adapt_bn=False)
    mapped = {"size": size, "megabytes": 64, "cache_mb": 64, "batches": 20}
    if not quick:
        # Larger than what may stay resident, so that pages have to be let go.
        mapped |= {"megabytes": 4096, "cache_mb": 512, "batches": 2000}
    return {
        "episodes": Case("data", {"cases": cases, "batches": 2 if quick else 25, "repeats": 3}),
        "share of a step": Case("sampling", {"work": work, "repeats": 2 if quick else 9}),
        **{
            f"packing, {px} px": Case(
                "packing",
                {
                    "size": px,
                    "packed": size,
                    "images": 80 if quick else 4000 * 84 // px,
                    "repeats": 2 if quick else 5,
                },
            )
            for px in ((size,) if quick else (84, 336))
        },
        "memory map": Case("mapped_images", mapped),
    }


def limit_plan(*, quick: bool) -> dict[str, Case]:
    """Matrix products, the share of their speed that a step reaches, and where ResNet-12 stands."""
    works = [_work(quick, size=size) for size in ((16,) if quick else (84, 28))]
    threads, repeats = ([1], 2) if quick else ([1, 2], 3)
    resnet = {"size": 32 if quick else 84, "tasks": 1, "steps": 1, "n_query": 1 if quick else 5}
    return {
        "conv4": Case("limit", {"works": works, "workers": threads, "repeats": repeats}),
        "resnet12": Case("resnet12", {"work": resnet, "repeats": 1 if quick else 2}),
    }


def growth_plan(*, quick: bool) -> dict[str, Case]:
    """Resident memory over many outer steps of a small second-order step with memory."""
    work = {"size": 28, "tasks": 2, "steps": 1, "n_query": 1, "n_way": 2}
    steps = 20 if quick else 10_000
    return {"2 workers": Case("growth", {"work": work, "steps": steps, "workers": 2})}


def simulation_plan(wanted: Asked) -> dict[str, Case]:
    """One memory of any size, without a learner."""
    name = f"{wanted.slots:,} slots, {wanted.value:,} bytes, {wanted.index}"
    return {name: Case("simulation", asdict(wanted), keep=False)}


PLANS: Mapping[str, Callable[..., dict[str, Case]]] = {
    "step": step_plan,
    "memory": memory_plan,
    "data": data_plan,
    "limit": limit_plan,
    "growth": growth_plan,
}
"""What each sub-command measures."""


def _work(quick: bool, **own: Any) -> dict[str, Any]:
    return {**(SMALL if quick else {}), **own}
