"""The rules by which numbers become verdicts."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["holds", "does not hold", "not testable here", "not run"]

RULE = (
    "A contrast is the mean paired difference on the same test tasks. Its interval is the 95 % interval"
    " over seeds and tasks (random effects) where there are two seeds or more, else over tasks."
    " 'Better' holds if the whole interval lies on the better side of zero, 'worse' if it lies on the"
    " worse side, 'no better' if it does not lie on the better side. A claim holds if all its contrasts"
    " hold, and does not hold otherwise; a difference that is merely not shown does not hold. 'At least as"
    " good' is held to the same rule as 'better'. Intervals speak of other seeds and other tasks of the same"
    " test classes, not of other classes."
)
"""Stated wherever verdicts are shown."""

OTHER_RULES = (
    "T1 must hold on all tasks and, over tasks, on every domain."
    " F1 compares the median training loss of the last window of the first seed, F4 the means of its"
    " matrix column by column, T6 the parameters (at most twice the printed ones), F6 the median time of"
    " an inner step (at most twice that of SGD; the paper's ratio is 1.5): these have no intervals."
)
"""Rules of the entries that draw no contrasts."""


def interval_of(contrast: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the interval that counts: over seeds and tasks if there is one, else over tasks."""
    found: Mapping[str, Any] = contrast["over_tasks"]
    if "over_seeds" in contrast:
        found = contrast["over_seeds"]["both"]
    return found


def judge(contrast: Mapping[str, Any], *, higher_is_better: bool) -> str:
    """Return holds, does not hold, or shown (where nothing is claimed)."""
    if contrast["expect"] == "shown":
        return "shown"
    side = _side(interval_of(contrast), higher_is_better=higher_is_better)
    wanted = {"better": ("better",), "worse": ("worse",), "no better": ("worse", "neither")}
    return "holds" if side in wanted[contrast["expect"]] else "does not hold"


def _side(interval: Mapping[str, Any], *, higher_is_better: bool) -> str:
    low, high = interval["low"], interval["high"]
    if low is not None and low > 0:
        return "better" if higher_is_better else "worse"
    if high is not None and high < 0:
        return "worse" if higher_is_better else "better"
    return "neither"
