"""``torchemo checkpoint``: which states of a run are saved, and whether every byte of them is right."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, final

import tyro

from torchemo.core.errors import CheckpointError
from torchemo.report.terminal import print_json, print_table, size

Run: TypeAlias = Annotated[Path, tyro.conf.arg(metavar="RUN")]


@final
@dataclass(frozen=True)
class ListCheckpoints:
    """List the checkpoints of a run; a quick look, without their checksums."""

    run_folder: tyro.conf.Positional[Run]
    """Folder of the run."""
    json: bool = False
    """Print the list as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.load import read_config
        from torchemo.runs.storage.checkpoint import published

        read_config(self.run_folder)
        found = [_describe(path) for path in published(self.run_folder)]
        # The newest knows best: an older one was the best only when it was saved.
        best = next((one["best_step"] for one in reversed(found) if not one["error"]), None)
        if self.json:
            print_json(found)
            return 0
        rows = [
            [
                str(one["step"]),
                "damaged" if one["error"] else size(one["bytes"]),
                "best" if one["step"] == best else "",
                one["error"] or ", ".join(f"{k} {v}" for k, v in one["versions"].items()),
            ]
            for one in found
        ]
        columns = ["step", "size", "validation", "written by"]
        print_table(f"Checkpoints of {self.run_folder}", columns, rows)
        return 0


@final
@dataclass(frozen=True)
class VerifyCheckpoints:
    """Check every byte of every checkpoint of a run."""

    run_folder: tyro.conf.Positional[Run]
    """Folder of the run."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Run the command; 4 if one of them is damaged."""
        from torchemo.runs.load import read_config, saved_checkpoints

        read_config(self.run_folder)
        paths = saved_checkpoints(self.run_folder)
        found = [{"checkpoint": path.name, "error": _damage(path)} for path in paths]
        sound = not any(one["error"] for one in found)
        if self.json:
            print_json({"sound": sound, "checkpoints": found})
        else:
            for one in found:
                print(f"{one['checkpoint']}: {one['error'] or 'every byte is as it was saved'}")
        return 0 if sound else CheckpointError.exit_code


@final
@dataclass(frozen=True)
class CheckpointCommand:
    """The saved states of a run: list them, verify them."""

    action: (
        Annotated[ListCheckpoints, tyro.conf.subcommand("list")]
        | Annotated[VerifyCheckpoints, tyro.conf.subcommand("verify")]
    )

    def run(self) -> int:
        """Run the chosen command."""
        return self.action.run()


def _describe(path: Path) -> dict[str, Any]:
    from torchemo.runs.storage.checkpoint import read_manifest, step_of

    try:
        found = read_manifest(path)
    except CheckpointError as error:
        return {"step": step_of(path), "bytes": None, "best_step": None, "versions": {},
                "groups": {}, "error": error.message}  # fmt: skip
    return {
        "step": found.step,
        "bytes": found.size,
        "best_step": found.info.get("progress", {}).get("best_step"),
        "versions": dict(found.versions),
        "groups": {group: entry.size for group, entry in found.groups.items()},
        "error": None,
    }


def _damage(path: Path) -> str | None:
    from torchemo.runs.storage.checkpoint import verify

    try:
        verify(path)
    except CheckpointError as error:
        return error.message
    return None
