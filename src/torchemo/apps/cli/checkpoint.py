"""``torchemo checkpoint``: which states of a run are saved, and whether every byte of them is right."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, final

import tyro

from torchemo.core.errors import CheckpointError
from torchemo.report.terminal import print_json, print_table, say, size

if TYPE_CHECKING:
    from torchemo.config.run import RunConfig

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
    """Check every byte of every checkpoint of a run, and that its options are those they were saved with."""

    run_folder: tyro.conf.Positional[Run]
    """Folder of the run."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Run the command; 4 if one of them is damaged."""
        from torchemo.runs.load import read_config, saved_checkpoints

        config = read_config(self.run_folder)
        paths = saved_checkpoints(self.run_folder)
        found = [
            {"checkpoint": path.name, "error": _damage(self.run_folder, config, path)}
            for path in paths
        ]
        sound = not any(one["error"] for one in found)
        if self.json:
            print_json({"sound": sound, "checkpoints": found})
        else:
            for one in found:
                say(f"{one['checkpoint']}: {one['error'] or 'every byte is as it was saved'}")
        return 0 if sound else CheckpointError.exit_code


@final
@dataclass(frozen=True)
class AcceptConfig:
    """Accept a config.toml that was changed on purpose after checkpoints were saved."""

    run_folder: tyro.conf.Positional[Run]
    """Folder of the run."""
    json: bool = False
    """Print the accepted changes as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.folder import lock
        from torchemo.runs.load import accept_config, read_config

        read_config(self.run_folder)
        with lock(self.run_folder):
            changes = accept_config(self.run_folder)
        if self.json:
            print_json({"accepted": changes})
            return 0
        for change in changes:
            say(f"accepted: {change}")
        if not changes:
            say("nothing to accept: config.toml is the one that the checkpoints were saved with")
        return 0


@final
@dataclass(frozen=True)
class CheckpointCommand:
    """The saved states of a run: list them, verify them, accept changed options."""

    action: (
        Annotated[ListCheckpoints, tyro.conf.subcommand("list")]
        | Annotated[VerifyCheckpoints, tyro.conf.subcommand("verify")]
        | Annotated[AcceptConfig, tyro.conf.subcommand("accept-config")]
    )

    def run(self) -> int:
        """Run the chosen command."""
        return self.action.run()


def _describe(path: Path) -> dict[str, Any]:
    from torchemo.runs.storage.checkpoint import read_manifest, step_of
    from torchemo.runs.storage.info import progress_of

    try:
        found = read_manifest(path)
        best = progress_of(found).best_step
    except CheckpointError as error:
        return {"step": step_of(path), "bytes": None, "best_step": None, "versions": {},
                "groups": {}, "error": error.message}  # fmt: skip
    return {
        "step": found.step,
        "bytes": found.size,
        "best_step": best,
        "versions": dict(found.versions),
        "groups": {group: entry.size for group, entry in found.groups.items()},
        "error": None,
    }


def _damage(root: Path, config: "RunConfig", path: Path) -> str | None:
    from torchemo.runs.load import check_config
    from torchemo.runs.storage.checkpoint import load
    from torchemo.runs.storage.info import check_run_state

    try:
        saved = check_run_state(load(path))
        check_config(root, config, saved.manifest)
    except CheckpointError as error:
        return error.message
    return None
