"""What memory costs: its verbs alone, against size, and as a share of the MAML step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch

from torchemo.config.run import (
    AggregatorConfig,
    AggregatorKind,
    EMOConfig,
    KeyConfig,
    MemoryConfig,
    RetrievalConfig,
    ValueConfig,
)
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
from torchemo.lab.bench.stores import K, full_of_vectors, unit_keys
from torchemo.lab.bench.work import Work
from torchemo.learners import Learner
from torchemo.memory.emo import EMO
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.runs.build import build_emo
from torchemo.training.step import outer_step

CAPACITY, TASKS = 200, 4


_RESTS = ", between two trainings of the keys"


# -- shares of the step ----------------------------------------------------------------------------


def emo_cases() -> dict[str, EMOConfig]:
    """Return what is added to MAML: each aggregator at the first or every step, ours, a key network."""
    cases = {}
    for kind in get_args(AggregatorKind):
        for word, steps in (("first step", "first"), ("every step", "all")):
            cases[f"{kind}, {word}"] = _literal(kind, steps)
    cases["consolidation"] = EMOConfig(
        memory=MemoryConfig(capacity=8, write="consolidate", warmup=1),
        key=KeyConfig(network="statistics", training="none"),
        retrieval=RetrievalConfig(k=None),
        aggregator=AggregatorConfig(kind="sum"),
        value=ValueConfig(content="meta"),
    )
    keys = {
        "key network, trained: outer": KeyConfig(training="outer"),
        "key network, trained: self_recognition": KeyConfig(training="self_recognition"),
        "key network, trained: self_recognition, start-up": KeyConfig(
            training="self_recognition", recognition_every=1
        ),
        "statistics network, trained: self_recognition": KeyConfig(
            network="learned_statistics", training="self_recognition"
        ),
    }
    for name, key in keys.items():
        cases[f"sum, {name}"] = EMOConfig(
            memory=MemoryConfig(capacity=CAPACITY),
            key=key,
            retrieval=RetrievalConfig(k=K),
            aggregator=AggregatorConfig(kind="sum"),
        )
    return cases


def _literal(kind: AggregatorKind, steps: Any) -> EMOConfig:
    """Uniform weights, k = 20 of T = 200, keys without a network: what is left is the aggregator."""
    return EMOConfig(
        memory=MemoryConfig(capacity=CAPACITY),
        key=KeyConfig(network="statistics", training="none"),
        retrieval=RetrievalConfig(k=K, weights="uniform"),
        aggregator=AggregatorConfig(kind=kind),
        value=ValueConfig(memory_steps=steps),
    )


def shares(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time the MAML step with each kind of memory, writes included, against the step without.

    A share of a few percent drowns in the noise of long steps, so what memory takes is also timed in steps
    that are short without it, many times: on small pictures, of which it sees none but through a key
    network; with a key network, with one inner step and one query per class, of which that sees no more.
    Seconds added there, as a share of the long step, are memory ``alone``.
    """
    work = Work(**request["work"])
    times = _step_times(work, emo_cases(), request["repeats"])
    found = rows(times, base="maml")
    for name, row in found.items():
        pairs = zip(times[name], times["maml"], strict=True)
        row["added_share"] = spread([own.cpu / base.cpu - 1 for own, base in pairs])
    step = found["maml"]["cpu"]["median"]
    for reads, short in (
        (False, replace(work, size=request["small"], n_query=1)),
        (True, replace(work, steps=1, n_query=1)),
    ):
        cases = {n: c for n, c in emo_cases().items() if reads == (c.key.network != "statistics")}
        times = _step_times(short, cases, request["small_repeats"])
        for name in cases:
            pairs = zip(times[name], times["maml"], strict=True)
            found[name]["alone"] = spread([(own.cpu - base.cpu) / step for own, base in pairs])
    return {"capacity": CAPACITY, "k": K, "rows": found}


def _step_times(
    work: Work, cases: Mapping[str, EMOConfig], repeats: int
) -> dict[str, list[Sample]]:
    learner, params, tasks = work.make_learner(), work.params(), work.episode()

    def step(
        emo: EMO | None, recognition: SelfRecognition | None = None, *, rests: bool = False
    ) -> None:
        found = outer_step(learner, params, tasks, emo=emo)
        if recognition is not None and rests:
            recognition.push(tasks.support)
        elif recognition is not None:
            recognition.step(tasks, params)
        if emo is not None and found.recall is not None:
            emo.remember(found.recall, found.values)

    variants = {"maml": Variant(lambda: step(None))}
    pauses = {}
    for name, config in cases.items():
        emo = build_emo(config, learner, work.shape)
        fill(emo, learner, params)
        own = None
        if config.key.training == "self_recognition" and emo.encoder is not None:
            own = SelfRecognition(emo.encoder, n_way=work.n_way, every=config.key.recognition_every)
            pauses[name] = own.every
            variants[name + _RESTS] = Variant(
                lambda emo=emo, own=own: step(emo, own, rests=True)  # type: ignore[misc]
            )
        variants[name] = Variant(lambda emo=emo, own=own: step(emo, own))  # type: ignore[misc]
    times = interleave(variants, repeats=repeats)
    for name, every in pauses.items():
        times[name] = _averaged(times[name], times.pop(name + _RESTS), every)
    return times


def _averaged(training: list[Sample], resting: list[Sample], every: int) -> list[Sample]:
    """Return what a step takes on average when keys are trained at every such step."""
    return [
        Sample(*((one + (every - 1) * other) / every for one, other in zip(*both, strict=True)))
        for both in zip(training, resting, strict=True)
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
    for kind in get_args(AggregatorKind):
        emo = build_emo(_literal(kind, "all"), learner, work.shape)
        fill(emo, learner, params)
        kinds[kind] = _verbs(emo, repeats)
    encoder = build_emo(EMOConfig(), learner, work.shape)
    support = work.episode().support
    encode = seconds_per_call(lambda: encoder.encode(support), repeats=repeats)
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


def _verbs(emo: EMO, repeats: int) -> dict[str, Spread]:
    keys = unit_keys(TASKS, "queries", emo.memory.key_dim)
    recall = emo.recall(keys)
    g = generator_for(0, "gradients")
    grads = {n: torch.randn(TASKS, *v.shape[1:], generator=g) for n, v in emo.memory.values.items()}
    timed: dict[str, Callable[[], object]] = {
        "recall": lambda: emo.recall(keys),
        "combine": lambda: emo.combine(grads, recall),
        "remember": lambda: emo.remember(recall, grads),
    }
    return {name: seconds_per_call(run, repeats=repeats) for name, run in timed.items()}


# -- memories to measure ---------------------------------------------------------------------------


def fill(emo: EMO, learner: Learner, params: Params) -> None:
    """Write random experiences into all slots."""
    memory, g = emo.memory, generator_for(0, "experiences")
    names = [n for n in params if n not in learner.loop.model.buffers]
    if not emo.consolidates:
        names = learner.loop.names(params)
    values = {n: 0.01 * torch.randn(memory.capacity, *params[n].shape, generator=g) for n in names}
    memory.write(unit_keys(memory.capacity, "slots", memory.key_dim), values)
