"""Runs compared on the same tasks: paired differences, per domain, over seeds."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from torchemo.core.errors import DataError
from torchemo.core.stats import paired_difference, seeds_by_tasks
from torchemo.runs.folder import RunFolder
from torchemo.runs.storage.seal import without_digest

SAME = ("protocol", "data", "episode", "domain", "metric")
"""What two results must share to be paired."""
_NUMBERS = ("seed", "cpu_seconds", "outer_steps")
"""What must be a number where a result has it; earlier versions wrote fewer."""
_LARGE = 1e18


def read_result(
    path: Path, *, split: str = "test", protocol: str = "standard", statistics: str = "inductive"
) -> dict[str, Any]:
    """Read the test result of a run folder, or a result file itself."""
    file = _result(path, split, protocol, statistics) if path.is_dir() else path
    if not path.exists() or (path.is_dir() and not RunFolder(path).config.is_file()):
        raise DataError(f"{path} is not a run, nor a result file.")
    absent = DataError(
        f"{path} has no {statistics} result of protocol '{protocol}' on split '{split}'.",
        hint=f"Make one with: torchemo eval {path} --protocol {protocol} --split {split}"
        f" --statistics {statistics}",
    )
    if not file.is_file():
        raise absent
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a result file: {error!s:.200}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} is not a result file: it is a {type(found).__name__}.")
    found = without_digest(found, what=str(file))
    missing = [name for name in (*SAME, "per_task", "method", "seed") if name not in found]
    if missing:
        raise DataError(f"{file} is not a result file: it lacks {missing}.")
    _check_form(found, file)
    # Results of earlier versions do not say so: they answered all queries of a task together.
    found["protocol"].setdefault("statistics", "transductive")
    if path.is_dir() and statistics == "transductive" != found["protocol"]["statistics"]:
        raise absent
    return found


def has_result(root: Path, *, split: str, protocol: str, statistics: str) -> bool:
    """Return whether there is a test result of a run, or whether this is none of our folders."""
    file = _result(root, split, protocol, statistics)
    return file.is_file() or not RunFolder(root).config.is_file()


def _check_form(found: Mapping[str, Any], file: Path) -> None:
    """Refuse a result whose parts are not of the kind that comparing them needs."""
    rows, domain, names = (found.get(name) for name in ("per_task", "domain", "domains"))
    try:
        table = np.array(rows, dtype=np.float64)
        sound = (
            table.ndim == 2
            and table.size > 0
            and bool(np.isfinite(table).all())
            and isinstance(domain, list)
            and isinstance(names, list)
            and len(domain) == len(table)
            and all(type(d) is int and -1 <= d < len(names) for d in domain)
            and isinstance(found["protocol"], dict)
            and all(isinstance(name, str) for name in (found["metric"], found["method"], *names))
            and all(_is_number(found[name]) for name in _NUMBERS if found.get(name) is not None)
        )
    except (TypeError, ValueError, OverflowError):
        sound = False
    if not sound:
        raise DataError(f"{file} is not a result file: it does not hold the scores of tasks.")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(cast(float, value)) < _LARGE


def _result(root: Path, split: str, protocol: str, statistics: str) -> Path:
    """Return where a result of a run is; those of earlier versions have no statistics in their names."""
    plain = root / f"eval-{split}-{protocol}.json"
    named = root / f"eval-{split}-{protocol}-{statistics}.json"
    return named if named.is_file() else plain


def check_comparable(results: Sequence[dict[str, Any]]) -> None:
    """Raise `DataError` if two results are not of the same tasks."""
    first = results[0]
    for other in results[1:]:
        different = [name for name in SAME if other[name] != first[name]]
        if different:
            raise DataError(
                f"{other['run']} and {first['run']} cannot be paired: their {different[0]} differs"
                f"{_how(other[different[0]], first[different[0]])}.",
                hint="Evaluate both on the same data with the same protocol, statistics, seed and number of"
                " tasks.",
            )


def _note_places(results: Sequence[dict[str, Any]]) -> None:
    """Say that results were computed at different places: their last bits differ, with bf16 much more."""
    places = sorted({str(result["place"]) for result in results if "place" in result})
    if len(places) > 1:
        warnings.warn(
            f"these results were computed in different ways: {'; '.join(places)}.", stacklevel=3
        )


def _how(one: Any, other: Any) -> str:
    """Say how two short values differ, field by field."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = [name for name in one if one[name] != other.get(name)]
        return f" ({'; '.join(f'{n}: {one[n]} and {other.get(n)}' for n in names)})"
    return f" ({one} and {other})" if isinstance(one, str) and len(one) < 40 else ""


def compare(base: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare one method with another, ``other`` minus ``base``, seed by seed on the same tasks.

    Args:
        base: Results of the first method, one per training seed.
        other: Results of the second, in the same order.

    Returns:
        Means, the paired difference over tasks (seed means), per domain, and over seeds if there are
        several. Where all results tell it, either side has its numbers of ``outer_steps``.
    """
    if len(base) != len(other):
        raise DataError(
            f"methods have {len(base)} and {len(other)} runs; seeds are compared one to one."
        )
    check_comparable([*base, *other])
    _note_places([*base, *other])
    a, b = (np.array([_last(r) for r in results]) for results in (base, other))
    domain = np.array(base[0]["domain"])
    names = base[0]["domains"]
    rows = {
        names[d]: paired_difference(b.mean(0)[domain == d], a.mean(0)[domain == d]).to_dict()
        for d in sorted(set(domain.tolist()))
        if d >= 0 and (domain == d).sum() > 1
    }
    found = {
        "metric": base[0]["metric"],
        "statistics": base[0]["protocol"]["statistics"],
        "base": _side(base, float(a.mean())),
        "other": _side(other, float(b.mean())),
        "tasks": int(a.shape[1]),
        "seeds": len(base),
        "difference": paired_difference(b.mean(0), a.mean(0)).to_dict(),
        "per_domain": rows,
        "per_step": [_per_step(results) for results in (base, other)],
    }
    if len(base) > 1:
        found["over_seeds"] = seeds_by_tasks(b - a).to_dict()
    return found


def _side(results: Sequence[dict[str, Any]], mean: float) -> dict[str, Any]:
    side: dict[str, Any] = {
        "method": results[0]["method"],
        "mean": mean,
        "runs": [str(result["run"]) for result in results],
        "train_seeds": [result["seed"] for result in results],
    }
    seconds = [float(s) for r in results if (s := r.get("cpu_seconds")) is not None]
    if len(seconds) == len(results):  # earlier results lack it
        side["cpu_seconds"] = round(sum(seconds) / len(seconds), 2)
    if all("outer_steps" in result for result in results):  # results of earlier versions lack it
        side["outer_steps"] = sorted({int(result["outer_steps"]) for result in results})
    return side


def _last(result: dict[str, Any]) -> list[float]:
    return [row[-1] for row in result["per_task"]]


def _per_step(results: Sequence[dict[str, Any]]) -> list[float]:
    return [float(v) for v in np.mean([np.mean(r["per_task"], axis=0) for r in results], axis=0)]
