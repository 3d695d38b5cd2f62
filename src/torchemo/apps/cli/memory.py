"""``torchemo memory``: what a run remembers, and if it is sound; stores of your own tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, final

import tyro

from torchemo.apps.cli import visits
from torchemo.apps.cli.build import BuildMemory
from torchemo.config.run import RunConfig
from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.report.terminal import print_json, print_table, say, told

if TYPE_CHECKING:
    from torchemo.memory.inspection.slots import MemoryView, SlotView
    from torchemo.memory.store import EpisodicMemory
    from torchemo.runs.storage.checkpoint import Checkpoint

Run: TypeAlias = Annotated[Path, tyro.conf.arg(metavar="RUN")]

MARKS = "abcdefghijklmnopqrstuvwxyz"
"""Domains on the map; slots of unknown domain are ``o``, places with several kinds ``*``."""


@final
@dataclass(frozen=True)
class ShowMemory:
    """Show the slots of a run's memory and a map of their keys."""

    run_folder: tyro.conf.Positional[Run]
    """Folder of the run."""
    step: int | None = None
    """Checkpoint to look at; the best on validation tasks by default."""
    rows: int = 20
    """Slots to list, the most recalled first; 0 lists all."""
    json: bool = False
    """Print everything as JSON, with the coordinates of the map."""

    def run(self) -> int:
        """Run the command."""
        if visits.is_store(self.run_folder):
            raise ConfigError(
                f"{self.run_folder} is a store, not a run.",
                hint=f"Look at it with: torchemo memory list {self.run_folder}",
            )
        from torchemo.memory.inspection.slots import survey
        from torchemo.runs.load import best_checkpoint, check_config, read_config
        from torchemo.runs.storage.info import tasks_of

        config = _with_memory(self.run_folder, read_config(self.run_folder))
        saved = best_checkpoint(self.run_folder, step=self.step)
        check_config(self.run_folder, config, saved.manifest)
        view = survey(_restored(config, saved))
        domains = tasks_of(saved.manifest)[1]
        failed = _failed(saved)
        if self.json:
            print_json({**_plain(view, domains, step=saved.step), "failed": failed})
            return 0
        _show(view, domains, title=f"{self.run_folder} at step {saved.step}", rows=self.rows)
        if failed:
            numbers = ", ".join(str(slot) for slot in failed)
            say(f"slots that failed validation, and are skipped in evaluation: {numbers}")
        return 0


@final
@dataclass(frozen=True)
class VerifyMemory:
    """Check the memory in every checkpoint of a run, or a store: checksums, numbers, book-keeping."""

    run_folder: tyro.conf.Positional[Run]
    """Folder of the run, or of the store."""
    step: int | None = None
    """Check this checkpoint only."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Run the command; 4 if something is damaged."""
        if visits.is_store(self.run_folder):
            return visits.verify(self.run_folder, json=self.json)
        from torchemo.runs.load import read_config, saved_checkpoints

        config = _with_memory(self.run_folder, read_config(self.run_folder))
        paths = saved_checkpoints(self.run_folder, step=self.step)
        found = [
            {"checkpoint": path.name, "faults": _faults(self.run_folder, config, path)}
            for path in paths
        ]
        sound = not any(one["faults"] for one in found)
        if self.json:
            print_json({"sound": sound, "checkpoints": found})
        else:
            for one in found:
                for fault in one["faults"] or ["memory is sound"]:
                    say(f"{one['checkpoint']}: {fault}")
        return 0 if sound else CheckpointError.exit_code


@final
@dataclass(frozen=True)
class MakeThumbnails:
    """Keep a few small training images behind each slot beside a run, for its page and its report.

    They are off unless this command makes them. No export holds them: the images may not be yours to give.
    """

    run_folder: tyro.conf.Positional[Run]
    """Folder of the run."""
    step: int | None = None
    """Checkpoint to look at; the best on validation tasks by default."""
    per_slot: int = 4
    """Images of each slot."""
    remove: bool = False
    """Delete the thumbnails of the run instead."""
    json: bool = False
    """Print what was written or removed as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.load import load_best
        from torchemo.runs.notes import thumbnails

        path = self.run_folder / thumbnails.FILE
        if self.remove:
            path.unlink(missing_ok=True)
            return told(self.json, f"removed: {path}", removed=str(path))
        if not 1 <= self.per_slot <= 64:
            raise ConfigError(f"--per-slot should be 1 to 64, got {self.per_slot}.")
        opened = load_best(self.run_folder, step=self.step, needed=("train",))
        found = thumbnails.make(opened, per_slot=self.per_slot)
        thumbnails.save(self.run_folder, found)
        images, slots = int(found.known.sum()), int((found.known > 0).sum())
        text = f"written: {path}, {images} images behind {slots} slots"
        return told(self.json, text, written=str(path), images=images, slots=slots)


@final
@dataclass(frozen=True)
class MemoryCommand:
    """The episodic memory of a run: show, verify, build. A store of your own tasks: the others."""

    action: (
        Annotated[ShowMemory, tyro.conf.subcommand("show")]
        | Annotated[VerifyMemory, tyro.conf.subcommand("verify")]
        | Annotated[MakeThumbnails, tyro.conf.subcommand("thumbnails")]
        | Annotated[BuildMemory, tyro.conf.subcommand("build")]
        | Annotated[visits.ListVisits, tyro.conf.subcommand("list")]
        | Annotated[visits.CreateStore, tyro.conf.subcommand("create")]
        | Annotated[visits.CalibrateRun, tyro.conf.subcommand("calibrate")]
        | Annotated[visits.ForgetVisits, tyro.conf.subcommand("forget")]
        | Annotated[visits.RenameClass, tyro.conf.subcommand("rename")]
        | Annotated[visits.MergeStores, tyro.conf.subcommand("merge")]
        | Annotated[visits.ExportStore, tyro.conf.subcommand("export")]
    )

    def run(self) -> int:
        """Run the chosen command."""
        return self.action.run()


def _with_memory(root: Path, config: RunConfig) -> RunConfig:
    if not config.memory.options.get("capacity"):
        raise ConfigError(
            f"{root} has no memory.",
            hint="Train with a preset that has one, such as --preset maml-emo or maml-offsets.",
        )
    return config


def _restored(config: RunConfig, saved: "Checkpoint") -> "EpisodicMemory":
    import torch

    from torchemo.memory.inspection.slots import restored_memory
    from torchemo.runs.storage import versions
    from torchemo.training.system import memory_state

    value_dtype = getattr(torch, config.memory.options["value_dtype"])
    place = versions.folder_of(config)
    return restored_memory(memory_state(saved.groups), value_dtype=value_dtype, values_dir=place)


def _failed(saved: "Checkpoint") -> list[int] | None:
    """Return the slots that failed validation; None where the memory does not judge them."""
    from torchemo.training.system import memory_state

    flags = memory_state(saved.groups).get("skip_unhelpful.failed")
    return None if flags is None else [int(slot) for slot in flags.nonzero().flatten()]


def _faults(root: Path, config: RunConfig, path: Path) -> list[str]:
    from torchemo.memory.inspection.slots import faults
    from torchemo.runs.load import check_config
    from torchemo.runs.storage import checkpoint
    from torchemo.runs.storage.info import check_run_state
    from torchemo.training.system import OLD_GROUP

    try:
        # What is not finite is named by slot below.
        saved = check_run_state(checkpoint.load(path, nonfinite_ok=("memory", OLD_GROUP)))
        check_config(root, config, saved.manifest)
        memory = _restored(config, saved)
    except CheckpointError as error:
        return [error.message]
    # Keys without this option, such as a learner's own, are always unit vectors.
    return faults(memory, unit=config.memory.options["key"].options.get("unit", True))


# -- show ----------------------------------------------------------------------------------------


def _domain(slot: "SlotView", domains: Sequence[str]) -> str | None:
    if slot.domain is None:
        return None
    known = 0 <= slot.domain < len(domains)
    return domains[slot.domain] if known else str(slot.domain)


def _plain(view: "MemoryView", domains: Sequence[str], *, step: int) -> dict[str, Any]:
    slots = [{**s._asdict(), "domain": _domain(s, domains)} for s in view.slots]
    return {"step": step, **view._asdict(), "slots": slots}


def _show(view: "MemoryView", domains: Sequence[str], *, title: str, rows: int) -> None:
    ordered = sorted(view.slots, key=lambda s: (-s.recalls, s.slot))
    listed = ordered[:rows] if rows > 0 else ordered
    columns = ["slot", "age", "recalls", "generation", "domain", "nearest", "distance", "norm"]
    print_table(f"Memory of {title}", columns, [_row(slot, domains) for slot in listed])
    if len(listed) < len(ordered):
        say(f"and {len(ordered) - len(listed)} more slots (--rows 0 lists all)")
    age = "" if view.mean_age is None else f", mean age {view.mean_age:.1f} batches"
    say(
        f"{view.filled} of {view.capacity} slots filled after {view.batches} batches{age},"
        f" each overwritten {view.turnover:.2f} times on average"
    )
    if view.filled > 1:
        say(f"map of the keys: two principal components, {view.mapped:.0%} of the variance")
        named = [(slot.place, _domain(slot, domains)) for slot in view.slots]
        say("\n".join(scatter(named)))


def _row(slot: "SlotView", domains: Sequence[str]) -> list[str]:
    return [
        str(slot.slot),
        str(slot.age),
        str(slot.recalls),
        str(slot.generation),
        _domain(slot, domains) or "",
        "" if slot.nearest is None else str(slot.nearest),
        "" if slot.distance is None else f"{slot.distance:.4f}",
        f"{slot.norm:.4g}",
    ]


def scatter(
    points: Sequence[tuple[tuple[float, float], str | None]], *, width: int = 64, height: int = 16
) -> list[str]:
    """Draw named points as lines of text, one letter per name, and say which letter is which."""
    names = sorted({name for _, name in points if name is not None})
    letter: dict[str | None, str] = {n: MARKS[i % len(MARKS)] for i, n in enumerate(names)}
    letter[None] = "o"
    grid = [[" "] * width for _ in range(height)]
    columns = _cells([x for (x, _), _ in points], width)
    rows = _cells([y for (_, y), _ in points], height)
    for column, row, (_, name) in zip(columns, rows, points, strict=True):
        line = grid[height - 1 - row]
        line[column] = letter[name] if line[column] in (" ", letter[name]) else "*"
    edge = f"+{'-' * width}+"
    legend = [", ".join(f"{letter[name]} = {name}" for name in names)] if names else []
    return [edge, *(f"|{''.join(line)}|" for line in grid), edge, *legend]


def _cells(values: Sequence[float], count: int) -> list[int]:
    low, high = min(values), max(values)
    span = high - low or 1.0
    return [round((value - low) / span * (count - 1)) for value in values]
