"""What memory costs: its verbs alone, against size, and as a share of the MAML step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from torchemo.config.registry import Part
from torchemo.core.rng import generator_for
from torchemo.core.types import Params
from torchemo.lab.bench.clock import (
    Sample,
    Spread,
    Variant,
    interleave,
    rows,
    seconds_per_call,
    spread,
)
from torchemo.lab.bench.measures.stores import K, build_memory, full_of_vectors, unit_keys
from torchemo.lab.bench.measures.work import Work
from torchemo.learners.hosting import remembered_by
from torchemo.learners.learner import Learner
from torchemo.memory import MEMORIES
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.interface import TaskMemory
from torchemo.memory.keys import KEYS
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.training.step import outer_step

CAPACITY, TASKS = 200, 4


_START = ", start-up"
_PAUSED = ", between two trainings of the keys"


# -- shares of the step ----------------------------------------------------------------------------


def memory_cases() -> dict[str, Part]:
    """Return what is added to MAML: each aggregator at the first or every step, offsets, key networks."""
    cases = {}
    for kind in AGGREGATORS:
        for word, steps in (("first step", "first"), ("every step", "all")):
            cases[f"{kind}, {word}"] = _gradients(kind, steps)
    key = Part("statistics")
    cases["offsets"] = Part("offsets", {"capacity": 8, "warmup": 1, "k": None, "key": key})
    recognising = {"training": "self_recognition"}
    keys = {
        "key network, trained: outer": Part("transformer", {"training": "outer"}),
        "key network, trained: self_recognition": Part("transformer", recognising),
        f"key network, trained: self_recognition{_START}": Part("transformer", recognising),
        "statistics network, trained: self_recognition": Part("learned-statistics", recognising),
    }
    for name, key in keys.items():
        cases[f"sum, {name}"] = Part("gradients", {"capacity": CAPACITY, "k": K, "key": key})
    return cases


def _gradients(kind: str, steps: str) -> Part:
    """Uniform weights, k = 20 of T = 200, keys without a network: what is left is the aggregator."""
    options = {
        "capacity": CAPACITY,
        "k": K,
        "weights": "uniform",
        "memory_steps": steps,
        "key": Part("statistics"),
        "aggregator": Part(kind),
    }
    return Part("gradients", options)


def shares(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time the MAML step with each kind of memory, writes included, against the step without.

    A share of a few percent drowns in the noise of long steps, so what memory takes is also timed in steps
    that are short without it, many times: on small images, of which it sees none but through a key
    network; with a key network, with one inner step and one query per class, of which that sees no more.
    Seconds added there, as a share of the long step, are memory ``alone``.
    """
    work = Work(**request["work"])
    times = _step_times(work, memory_cases(), request["repeats"])
    found = rows(times, base="maml")
    for name, row in found.items():
        pairs = zip(times[name], times["maml"], strict=True)
        row["added_share"] = spread([own.cpu / base.cpu - 1 for own, base in pairs])
    step = found["maml"]["cpu"]["median"]
    for learned, short in (
        (False, replace(work, size=request["small"], n_query=1)),
        (True, replace(work, steps=1, n_query=1)),
    ):
        # Keys without weights read a few numbers of each image; a network that learns reads all of it.
        cases = {n: c for n, c in memory_cases().items() if learned == (_key(c).training != "none")}
        times = _step_times(short, cases, request["small_repeats"])
        for name in cases:
            pairs = zip(times[name], times["maml"], strict=True)
            found[name]["alone"] = spread([(own.cpu - base.cpu) / step for own, base in pairs])
    return {"capacity": CAPACITY, "k": K, "rows": found}


def _key(part: Part) -> Any:
    """Return the options of a memory's key."""
    _, options = MEMORIES.resolve(part)
    return KEYS.resolve(options.key)[1]


def _step_times(work: Work, cases: Mapping[str, Part], repeats: int) -> dict[str, list[Sample]]:
    learner, params, tasks = work.make_learner(), work.params(), work.episode()

    def step(
        memory: TaskMemory | None,
        recognition: SelfRecognition | None = None,
        *,
        trains: bool = True,
    ) -> None:
        found = outer_step(learner, params, tasks, memory=memory)
        if recognition is not None and trains:
            recognition.step(tasks, params)
        elif recognition is not None:
            recognition.push(tasks.support)
        if memory is not None and found.recall is not None:
            memory.remember(found.recall, found.values, slot_key_gradient=found.slot_key_gradient)

    variants = {"maml": Variant(lambda: step(None))}
    pauses = {}
    for name, part in cases.items():
        memory = build_memory(part, learner, work.shape)
        fill(memory, learner, params)
        own = _recognition(part, memory, work, every=1 if name.endswith(_START) else None)
        if own is not None:
            # Keys train at some steps only: both kinds of steps are timed, and averaged below.
            pauses[name] = own.every
            variants[name + _PAUSED] = Variant(
                lambda memory=memory, own=own: step(memory, own, trains=False)  # type: ignore[misc]
            )
        variants[name] = Variant(lambda memory=memory, own=own: step(memory, own))  # type: ignore[misc]
    times = interleave(variants, repeats=repeats)
    for name, every in pauses.items():
        times[name] = _averaged(times[name], times.pop(name + _PAUSED), every)
    return times


def _recognition(
    part: Part, memory: TaskMemory, work: Work, *, every: int | None
) -> SelfRecognition | None:
    key = _key(part)
    if key.training != "self_recognition" or memory.encoder is None:
        return None
    return SelfRecognition(memory.encoder, n_way=work.n_way, every=every)


def _averaged(training: list[Sample], paused: list[Sample], every: int) -> list[Sample]:
    """Return what a step takes on average when keys are trained at every such step."""
    return [
        Sample(*((one + (every - 1) * other) / every for one, other in zip(*both, strict=True)))
        for both in zip(training, paused, strict=True)
    ]


# -- the verbs alone -------------------------------------------------------------------------------


def verbs(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time encode, recall, combine and remember alone.

    With every aggregator on Conv-4's tensors, then with Sum against k and against the number of
    remembered parameters.
    """
    work = Work(**request["work"])
    learner, params = work.make_learner(), work.params()
    repeats, kinds = request["repeats"], {}
    for kind in AGGREGATORS:
        memory = build_memory(_gradients(kind, "all"), learner, work.shape)
        fill(memory, learner, params)
        kinds[kind] = _verbs(memory, repeats)
    encoder = build_memory(Part("gradients"), learner, work.shape)
    support = work.episode().support
    encode = seconds_per_call(lambda: encoder.encode(support), repeats=repeats)
    # One vector per slot instead of a network's tensors, so that a single number varies.
    by_k = [
        {"value": k, **_verbs(full_of_vectors(CAPACITY, size=32_645, k=k), repeats)}
        for k in request["k"]
    ]
    by_size = [
        {"value": n, **_verbs(full_of_vectors(50, size=n), repeats)} for n in request["parameters"]
    ]
    return {
        "tasks": TASKS,
        "encode": encode,
        "aggregators": kinds,
        "against_k": by_k,
        "against_parameters": by_size,
    }


def _verbs(memory: TaskMemory, repeats: int) -> dict[str, Spread]:
    store, g = memory.store, generator_for(0, "gradients")
    keys = unit_keys(TASKS, "queries", store.key_dim)
    recall = memory.recall(keys)
    grads = {n: torch.randn(TASKS, *v.shape[1:], generator=g) for n, v in store.values.items()}
    timed: dict[str, Callable[[], object]] = {
        "recall": lambda: memory.recall(keys),
        "combine": lambda: memory.combine(grads, recall),
        "remember": lambda: memory.remember(recall, grads),
    }
    return {name: seconds_per_call(run, repeats=repeats) for name, run in timed.items()}


# -- memories to measure ---------------------------------------------------------------------------


def fill(memory: TaskMemory, learner: Learner, params: Params) -> None:
    """Write random experiences into all slots."""
    store, g = memory.store, generator_for(0, "experiences")
    names = remembered_by(learner, memory.content)
    values = {n: 0.01 * torch.randn(store.capacity, *params[n].shape, generator=g) for n in names}
    store.write(unit_keys(store.capacity, "slots", store.key_dim), values)
