"""Results on a disk: those of this machine, and the small ones that are kept with the project."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from torchemo.errors import DataError
from torchemo.study.result import write_json

LARGEST = 1_000_000
"""Bytes of a file that may be kept with the project."""

_NEEDED = ("format", "entry", "scale", "tasks", "cells", "contrasts", "seeds", "command")


def read_result(path: Path) -> dict[str, Any]:
    """Read a ``result.json``.

    Raises:
        DataError: It is not one.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in _NEEDED if name not in found]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not the result of a study: {error}.") from error
    if missing:
        raise DataError(f"{path} is not the result of a study: it lacks {missing}.")
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


def record(folder: Path, to: Path) -> list[Path]:
    """Keep a result with the project: ``<entry>-<scale>-<tasks>.json`` and the scores of its tasks.

    Scores are kept after every inner step if they are small enough, else after the last one alone.

    Raises:
        DataError: The folder holds no result, or it is too large.
    """
    result = read_result(folder / "result.json")
    name = f"{result['entry']}-{result['scale']}-{result['tasks']}"
    kept = [to / f"{name}.json", to / f"{name}.npz"]
    write_json(kept[0], result)
    scores = folder / "scores.npz"
    with np.load(scores) as arrays:
        if not arrays.files:  # costs are of no tasks
            return kept[:1]
    if scores.stat().st_size <= LARGEST:
        shutil.copyfile(scores, kept[1])
    else:
        with np.load(scores) as arrays:
            last = {n: a[..., -1:] if a.ndim == 3 else a for n, a in arrays.items()}
        with kept[1].open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **last)
    large = [path for path in kept if path.stat().st_size > LARGEST]
    if large:
        for path in kept:
            path.unlink()
        raise DataError(
            f"{large[0].name} would have more than {LARGEST:,} bytes.",
            hint="Record fewer seeds, or leave out controls.",
        )
    return kept
