"""``report.html`` of a run."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, final

from torchemo.config.registry import Part
from torchemo.config.run import RunConfig
from torchemo.core.errors import TorchemoError
from torchemo.core.stats import mean_interval
from torchemo.report.format import data_of, flat, memory_of, method_of, metric_of
from torchemo.report.page import render
from torchemo.report.run import sections
from torchemo.report.run.collect import RunFacts, best_validation, collect, is_synthetic, metric_in
from torchemo.report.run.memory import MemoryView, view_memory
from torchemo.report.run.probe import Probe, probe
from torchemo.report.run.samples import PictureSample, PointSample, sample_tasks
from torchemo.report.run.slot_tasks import SlotShown, what_slots_stand_for
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import Opened, load_best

MAX_SLOTS = 50
"""Rows of the table of slots."""


@final
@dataclass(frozen=True)
class Reopened:
    """A run opened at its best checkpoint, or the sentence that says why it could not be.

    Attributes:
        step: The step of the checkpoint.
        memory: What the memory held, if it held anything.
        samples: Sample tasks.
        slots: What the slots stand for.
        problem: Why there is nothing of this.
    """

    step: int = 0
    memory: MemoryView | None = None
    samples: tuple[PictureSample | PointSample, ...] = ()
    slots: tuple[SlotShown, ...] = ()
    problem: str | None = None


class Tile(NamedTuple):
    """A number that stands out at the top."""

    label: str
    value: str
    remark: str


def write_run_report(root: Path) -> Path:
    """Write ``report.html`` of a run: one file that needs nothing else.

    Sample tasks and the map of the memory are computed again from the best checkpoint. What the run does
    not have (a test result, a memory, a checkpoint) leaves one sentence in its section.
    """
    facts = collect(root)
    folder = RunFolder(root)
    folder.save(folder.report, _page(facts, _reopen(root)))
    return folder.report


def _page(facts: RunFacts, reopened: Reopened) -> str:
    config = facts.config
    memory = memory_of(config)
    return render(
        "run.html.j2",
        title=f"{method_of(config)} on {data_of(config)}",
        name=facts.name,
        synthetic=is_synthetic(config.data),
        tiles=_tiles(facts),
        started=_started(facts),
        problems=facts.problems,
        learning=sections.learning(facts),
        results=[sections.result(found, order=i) for i, found in enumerate(facts.results)],
        remembers=memory is not None,
        offsets=memory is not None and memory.offsets_start,
        phases=_phases(facts),
        turnover=sections.turnover(facts),
        memory=reopened.memory,
        memory_map=None if reopened.memory is None else sections.memory_map(reopened.memory),
        max_slots=MAX_SLOTS,
        reopened=reopened,
        samples=[sections.sample(task, order=i) for i, task in enumerate(reopened.samples)],
        changed=sections.changed_options(config),
        config_text=facts.config_text,
        environment=flat(facts.environment),
    )


def _reopen(root: Path) -> Reopened:
    try:
        opened = load_best(root)
        found = probe(opened)
        memory = _memory(opened, found)
        stands = None if found is None or memory is None else (opened, found, memory)
        return Reopened(
            step=opened.system.iteration,
            memory=memory,
            samples=tuple(sample_tasks(opened, found)),
            slots=() if stands is None else tuple(what_slots_stand_for(*stands)),
        )
    except TorchemoError as error:
        return Reopened(problem=error.message.replace(f"{root}/", "").replace(str(root), "the run"))


def _memory(opened: Opened, found: Probe | None) -> MemoryView | None:
    memory = opened.system.memory
    if memory is None or found is None or len(memory.store) == 0:
        return None
    return view_memory(memory, found, opened.source.domains)


def _tiles(facts: RunFacts) -> list[Tile]:
    tiles = []
    best = best_validation(facts.events)
    if best is not None:
        metric = metric_in(facts.config)
        remark = f"{metric.unit}, at step {best.step}"
        tiles.append(Tile("best validation", metric.write(abs(best.score)), remark))
    for result in facts.results:
        metric, last = metric_of(result.metric), mean_interval(result.per_task[:, -1])
        label = result.split if result.on is None else f"{result.split}, {result.on}"
        if result.protocol != "standard":
            label += f", {result.protocol} protocol"
        if result.statistics != "inductive":
            label += f", {result.statistics}"
        remark = f"{metric.unit}, {metric.interval(last.low, last.high)}, {last.n} tasks"
        tiles.append(Tile(label, metric.write(last.value), remark))
    skipped = sum(event["event"] == "skipped" for event in facts.events)
    remark = f"of {facts.config.outer_steps:,}, seed {facts.config.train.seed}"
    if skipped:
        remark += f", {skipped} skipped: not finite"
    tiles.append(Tile("outer steps", f"{_done(facts):,}", remark))
    memory = _memory_tile(facts.config)
    return tiles if memory is None else [*tiles, memory]


def _memory_tile(config: RunConfig) -> Tile | None:
    memory, options = memory_of(config), config.memory.options
    if memory is None:
        return None
    controller = options.get("controller")
    kind = controller.name.upper() if isinstance(controller, Part) else memory.title
    return Tile("memory", f"{options['capacity']:,}", f"slots, {kind}")


def _done(facts: RunFacts) -> int:
    return max((event["step"] for event in facts.events), default=0)


def _phases(facts: RunFacts) -> str | None:
    """Say how many steps learner and memory had; None if both train together."""
    own = facts.config.memory_steps
    if own is None:
        return None
    steps, done = facts.config.outer_steps - own, _done(facts)
    learner, memory = (f"{n:,}" for n in (min(done, steps), max(done - steps, 0)))
    return (
        f"The learner trained for {learner} of {steps:,} outer steps; then it is frozen and the slots"
        f" train alone: they had {memory} of {own:,} steps."
    )


def _started(facts: RunFacts) -> str | None:
    time = facts.events[0].get("time") if facts.events else None
    if not isinstance(time, int | float) or not 0 <= time < 2**34:
        return None
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
