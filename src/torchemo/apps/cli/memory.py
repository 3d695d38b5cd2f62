"""``torchemo memory``: what a run remembers, how old it is, how often recalled, and if it is sound."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, final

import tyro

from torchemo.config.run import RunConfig
from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.report.terminal import print_json, print_table

if TYPE_CHECKING:
    from torchemo.core.types import Params
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
        from torchemo.memory.inspection.slots import survey
        from torchemo.runs.load import best_checkpoint, read_config

        config = _with_memory(self.run_folder, read_config(self.run_folder))
        saved = best_checkpoint(self.run_folder, step=self.step)
        view = survey(_restored(config, saved))
        domains = [str(name) for name in saved.info.get("domains", [])]
        failed = _failed(saved)
        if self.json:
            print_json({**_plain(view, domains, step=saved.step), "failed": failed})
            return 0
        _show(view, domains, title=f"{self.run_folder} at step {saved.step}", rows=self.rows)
        if failed:
            numbers = ", ".join(str(slot) for slot in failed)
            print(f"slots that failed validation, and are skipped in evaluation: {numbers}")
        return 0


@final
@dataclass(frozen=True)
class VerifyMemory:
    """Check the memory in every checkpoint of a run: checksums, numbers, keys, book-keeping."""

    run_folder: tyro.conf.Positional[Run]
    """Folder of the run."""
    step: int | None = None
    """Check this checkpoint only."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Run the command; 4 if something is damaged."""
        from torchemo.runs.load import read_config, saved_checkpoints

        config = _with_memory(self.run_folder, read_config(self.run_folder))
        paths = saved_checkpoints(self.run_folder, step=self.step)
        found = [{"checkpoint": path.name, "faults": _faults(config, path)} for path in paths]
        sound = not any(one["faults"] for one in found)
        if self.json:
            print_json({"sound": sound, "checkpoints": found})
        else:
            for one in found:
                for fault in one["faults"] or ["memory is sound"]:
                    print(f"{one['checkpoint']}: {fault}")
        return 0 if sound else CheckpointError.exit_code


@final
@dataclass(frozen=True)
class MemoryCommand:
    """The episodic memory of a run: show it, verify it."""

    action: (
        Annotated[ShowMemory, tyro.conf.subcommand("show")]
        | Annotated[VerifyMemory, tyro.conf.subcommand("verify")]
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


def _state(saved: "Checkpoint") -> "Params":
    """Return the saved state of the memory; earlier versions named it differently."""
    from torchemo.memory.interface import current_names
    from torchemo.training.system import OLD_GROUP

    return current_names(dict(saved.groups.get("memory", saved.groups.get(OLD_GROUP, {}))))


def _restored(config: RunConfig, saved: "Checkpoint") -> "EpisodicMemory":
    import torch

    from torchemo.memory.inspection.slots import restored_memory

    value_dtype = getattr(torch, config.memory.options["value_dtype"])
    return restored_memory(_state(saved), value_dtype=value_dtype)


def _failed(saved: "Checkpoint") -> list[int] | None:
    """Return the slots that failed validation; None where the memory does not judge them."""
    flags = _state(saved).get("skip_unhelpful.failed")
    return None if flags is None else [int(slot) for slot in flags.nonzero().flatten()]


def _faults(config: RunConfig, path: Path) -> list[str]:
    from torchemo.memory.inspection.slots import faults
    from torchemo.runs.storage import checkpoint
    from torchemo.training.system import OLD_GROUP

    try:
        # What is not finite is named by slot below.
        saved = checkpoint.load(path, nonfinite_ok=("memory", OLD_GROUP))
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
        print(f"and {len(ordered) - len(listed)} more slots (--rows 0 lists all)")
    age = "" if view.mean_age is None else f", mean age {view.mean_age:.1f} batches"
    print(
        f"{view.filled} of {view.capacity} slots filled after {view.batches} batches{age},"
        f" each overwritten {view.turnover:.2f} times on average"
    )
    if view.filled > 1:
        print(f"map of the keys: two principal components, {view.mapped:.0%} of the variance")
        named = [(slot.place, _domain(slot, domains)) for slot in view.slots]
        print("\n".join(scatter(named)))


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
