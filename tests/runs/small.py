"""Runs small enough for tests: an MLP on curves, with the paper's memory or with offsets."""

from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, RunConfig, TrainConfig
from torchemo.runs import events
from torchemo.runs.storage import checkpoint, history

TASKS = DataConfig(source=("regression:hsml4",), n_shot=4, n_query=4)
AFTER = "after"
"""An offset memory that trains after the learner, as `config` is asked for it."""
KEY = Part("transformer", {"embedder": "pairs", "dim": 8, "heads": 2, "ff": 8, "layers": 1})


def config(learner="maml", *, memory="gradients", aggregator="sum", controller="lru", seed=0):
    """A run of nine outer steps; ``memory`` is none, gradients (the paper's), offsets or `AFTER`."""
    kept = {
        "none": Part("none"),
        "gradients": paper_memory(aggregator, controller),
        "offsets": offset_memory(),
        AFTER: offset_memory(memory_steps=5),
    }[memory]
    steps = 4 if memory == AFTER else 9
    return RunConfig(
        learner=learner_part(learner),
        model=Part("mlp", {"hidden": (6,)}),
        memory=kept,
        data=TASKS,
        train=TrainConfig(steps=steps, tasks=2, validate_every=4, validation_tasks=4, seed=seed),
    )


def learner_part(name):
    inner = {"inner_lr": 0.01, "steps": 2}
    if name == "bmg":
        return Part(name, {"base": Part("maml", inner)})
    return Part(name, inner | ({"rate_init": (0.01, 0.02)} if name == "meta-sgd" else {}))


def paper_memory(aggregator="sum", controller="lru"):
    kind = Part(aggregator, {"layers": 1} if aggregator == "gate" else {})
    options = {"capacity": 5, "k": 3, "recall_dropout": 0.3, "key": KEY}
    return Part("gradients", {**options, "aggregator": kind, "controller": Part(controller)})


def offset_memory(*, memory_steps=None):
    """A memory of offsets; with ``memory_steps`` it trains that long after the learner."""
    key = KEY.set(training="self_recognition", recognition_older=6)
    rules = {"skip_unfamiliar": 0.9, "skip_unhelpful": 0.0}
    memory = Part("offsets", {"capacity": 3, "k": 3, "warmup": 3, "key": key, **rules})
    if memory_steps is None:
        return memory.set(recall_dropout=0.3)
    return memory.set(steps=memory_steps)


def stop_after(steps):
    """Ask to stop once this many outer steps are done."""
    seen = []

    def should_stop():
        seen.append(1)
        return len(seen) >= steps

    return should_stop


def final_state(root):
    return checkpoint.load(history.latest(root).path)


def log(root):
    return [
        {k: v for k, v in event.items() if k not in ("time", "cpu_seconds")}
        for event in events.read(root / "events.jsonl")
    ]
