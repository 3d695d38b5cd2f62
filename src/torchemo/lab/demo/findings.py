"""What the demo found, as numbers with intervals and as sentences."""

from typing import Any, TypeAlias

import numpy as np
from scipy import stats
from torch import Tensor

from torchemo.core.stats import Estimate, mean_interval, paired_difference
from torchemo.lab.demo.methods import BASE, EMO, OFFSETS, REPLAY, STRANGERS, Measured

Found: TypeAlias = dict[str, Any]


def findings(measured: Measured) -> Found:
    """Return errors by visit, and the comparisons that matter, as plain values."""
    errors = measured.errors
    return {
        "visits": len(measured.visits),
        "curves": errors[BASE].shape[1],
        "errors": {name: [_mean(row) for row in rows] for name, rows in errors.items()},
        "memory": _against(errors[EMO][-1], errors[BASE][-1]),
        "control": _against(errors[STRANGERS][-1], errors[BASE][-1]),
        "replay": _against(errors[REPLAY][-1], errors[BASE][-1]),
        "offsets_on_new_curves": _against(errors[OFFSETS][0], errors[BASE][0]),
        "numbers_per_visit": measured.numbers,
    }


def sentences(found: Found) -> list[str]:
    """Say what was found: the headline first."""
    nth = found["visits"]
    rows = ((EMO, "memory"), (REPLAY, "replay"), (STRANGERS, "control"))
    lines = [f"At visit {nth}, {name} has {_change(found[row])} {BASE}." for name, row in rows]
    return [
        *lines,
        f"On new curves, {OFFSETS} has {_change(found['offsets_on_new_curves'])} {BASE}.",
    ]


def meaning(found: Found) -> str:
    """Say in a sentence what the headline means."""
    if found["memory"]["verdict"] == "better":
        return (
            "A learner that remembers the gradients of earlier visits gets better each time a task"
            " comes back, and stores none of the earlier points."
        )
    return "At this size, remembered gradients of earlier visits have no significant effect."


def _mean(row: Tensor) -> dict[str, Any]:
    return mean_interval(row.double().numpy()).to_dict()


def _against(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Compare two methods on the same curves; the verdict is that of the paired difference."""
    a, b = ours.double().numpy(), theirs.double().numpy()
    pair = paired_difference(a, b)
    low, high = pair.difference.low, pair.difference.high
    verdict = "better" if high < 0 else "worse" if low > 0 else "not significant"
    relative = _relative(a, b).to_dict()
    return {**pair.to_dict(), "relative": relative, "verdict": verdict}


def _relative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> Estimate:
    """Return the relative change of the mean error, with a bootstrap interval over curves."""
    draws = stats.bootstrap(
        (a, b), _ratio, paired=True, n_resamples=4999, method="percentile", rng=0
    )
    ends = draws.confidence_interval
    value = float(_ratio(a, b))
    return Estimate(value, float(ends.low), float(ends.high), len(a), "paired bootstrap")


def _ratio(a: Any, b: Any, axis: int = -1) -> Any:
    return np.mean(a, axis=axis) / np.mean(b, axis=axis) - 1


def _change(row: Found) -> str:
    """Write a relative change with its interval, such as ``62 % less error [55, 68] than``."""
    change = row["relative"]
    value, low, high = (change[name] for name in ("value", "low", "high"))
    if row["verdict"] == "not significant":
        return f"{100 * value:+.0f} % error [{100 * low:+.0f}, {100 * high:+.0f}] (not significant) against"
    if value < 0:
        return f"{-100 * value:.0f} % less error [{-100 * high:.0f}, {-100 * low:.0f}] than"
    return f"{1 + value:.2g} times the error [{1 + low:.2g}, {1 + high:.2g}] of"
