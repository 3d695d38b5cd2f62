"""Results on a disk: those of this machine, and the small ones that are kept with the project."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from torchemo.core.errors import DataError
from torchemo.lab.study.result import write_json
from torchemo.lab.study.scales import OLD_TASKS

LARGEST = 1_000_000
"""Bytes of a file that may be kept with the project."""

_NEEDED = ("format", "entry", "scale", "tasks", "cells", "contrasts", "seeds", "command")


def path_of(folder: Path, entry: str, scale: str, tasks: str, ending: str = "") -> Path:
    """Return where a study's result or record is, also one that was named before images were."""
    now, before = (
        folder / f"{entry}-{scale}-{named}{ending}"
        for named in (tasks, OLD_TASKS if tasks == "images" else tasks)
    )
    return before if before.exists() and not now.exists() else now


def read_result(path: Path) -> dict[str, Any]:
    """Read a ``result.json``."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in _NEEDED if name not in found]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not the result of a study: {error}.") from error
    if missing:
        raise DataError(f"{path} is not the result of a study: it lacks {missing}.")
    if found["tasks"] == OLD_TASKS:
        command = found["command"].replace(f"--tasks {OLD_TASKS}", "--tasks images")
        found |= {"tasks": "images", "command": command}
    return found


def read_results(
    out: Path, entry: str, *, scale: str | None = None, tasks: str | None = None
) -> list[dict[str, Any]]:
    """Read the results of an entry under a folder of studies."""
    found = [read_result(path) for path in sorted(out.glob(f"{entry}-*/result.json"))]
    return [
        result
        for result in found
        if scale in (None, result["scale"]) and tasks in (None, result["tasks"])
    ]


def record(folder: Path, to: Path, *, replace: bool = False) -> list[Path]:
    """Keep a result with the project: ``<entry>-<scale>-<tasks>.json`` and the scores of its tasks.

    Scores are kept after every inner step if they are small enough, else after the last one alone.

    Args:
        folder: Folder of the result.
        to: Folder of the records.
        replace: Put it in the place of a record that has cells or seeds which this one has not.
    """
    result = read_result(folder / "result.json")
    name = f"{result['entry']}-{result['scale']}-{result['tasks']}"
    kept = [to / f"{name}.json", to / f"{name}.npz"]
    earlier = path_of(to, result["entry"], result["scale"], result["tasks"], ".json")
    if earlier.exists() and not replace:
        _check_nothing_is_lost(read_result(earlier), result, earlier)
    to.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(
        dir=to
    ) as place:  # what is kept already stays until the new one is whole
        written = [Path(place) / path.name for path in kept]
        write_json(written[0], result)
        if not _write_scores(folder / "scores.npz", written[1]):
            written, kept = written[:1], kept[:1]
        large = [path for path in written if path.stat().st_size > LARGEST]
        if large:
            raise DataError(
                f"{large[0].name} would have more than {LARGEST:,} bytes.",
                hint="Record fewer seeds, or leave out controls.",
            )
        for path, final in zip(written, kept, strict=True):
            path.replace(final)
    return kept


def _write_scores(scores: Path, to: Path) -> bool:
    """Write scores as small as they must be; False if there are none, as costs are of no tasks."""
    with np.load(scores) as arrays:
        if not arrays.files:
            return False
    if scores.stat().st_size <= LARGEST:
        shutil.copyfile(scores, to)
        return True
    with np.load(scores) as arrays:
        last = {n: a[..., -1:] if a.ndim == 3 else a for n, a in arrays.items()}
    with to.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **last)
    return True


def _check_nothing_is_lost(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    cells = [{cell["name"] for cell in one["cells"]} for one in (old, new)]
    lost = [
        *sorted(cells[0] - cells[1]),
        *(f"seed {s}" for s in old["seeds"] if s not in new["seeds"]),
    ]
    if lost:
        raise DataError(
            f"{path} also has {', '.join(lost)}, which would be lost.",
            hint="Bring them back with 'study restore' and run all of its cells; or give --replace.",
        )
