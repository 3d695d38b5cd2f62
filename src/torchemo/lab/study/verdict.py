"""The rules by which numbers become verdicts."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from torchemo.report.format import METRICS

Verdict: TypeAlias = Literal["holds", "does not hold", "undecided", "not testable here", "not run"]

POINTS, SHARE = 0.01, 0.1
"""No better means: better by no more than a point of accuracy, or a tenth of the error."""

RULE = (
    "A contrast is the mean paired difference on the same test tasks. Its interval is the 95 % interval"
    " over seeds and tasks (random effects) where there are two seeds or more, else over tasks. 'Better'"
    " holds if the whole interval lies on the better side of zero, 'worse' if it lies on the worse side; a"
    " difference that is merely not significant does not hold. 'No better' holds if the interval rules out a"
    " gain of more than a point, or a tenth of the error, does not hold if it shows a gain, and is undecided"
    " otherwise. With one seed nothing holds: what would is undecided. What diverged is not better, and"
    " worse than what did not, but if it did so at home no proof of harm elsewhere; a control that diverged"
    " decides nothing. A claim holds if all its contrasts hold, does not hold if one does not, and is"
    " undecided if one is, or was not run. 'At least as good' is held to the same rule as 'better'."
    " Intervals suppose that differences between seeds are normal, which three seeds cannot show; they speak"
    " of other seeds and other tasks of the same test classes, not of other classes, and are not corrected"
    " for their number."
)
"""Stated wherever verdicts are shown."""

OTHER_RULES = (
    "T1 must hold on all tasks and, over tasks, on every domain. T7 and T8 set ARML with memory against"
    " ARML and MAML, and ARML and HSML against MAML; the others are in their tables alone."
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


def verdict_of(contrast: Mapping[str, Any]) -> str:
    """Return holds, does not hold, undecided, or shown (where nothing is claimed) of a recorded contrast.

    Records are judged by these rules whenever they are read, whatever the rules were when they were made.
    """
    if contrast["expect"] == "shown":
        return "shown"
    if contrast["diverged"]:
        return _of_diverged(contrast)
    found = _of_interval(contrast, interval_of(contrast))
    return "undecided" if found == "holds" and "over_seeds" not in contrast else found


def over_tasks(contrast: Mapping[str, Any], domain: str) -> str:
    """Return the verdict of a contrast on one domain, over tasks."""
    return _of_interval(contrast, contrast["per_domain"][domain])


def together(verdicts: Iterable[str]) -> Verdict:
    """Return the verdict of a claim from those of its contrasts."""
    found = set(verdicts)
    if "does not hold" in found:
        return "does not hold"
    return "undecided" if found != {"holds"} else "holds"


def _of_interval(contrast: Mapping[str, Any], interval: Mapping[str, Any]) -> str:
    better = METRICS[contrast["metric"]].higher_is_better
    side = _side(interval, higher_is_better=better)
    if contrast["expect"] != "no better":
        return "holds" if side == contrast["expect"] else "does not hold"
    if side == "better":
        return "does not hold"
    most = interval["high"] if better else interval["low"]
    margin = POINTS if contrast["metric"] == "accuracy" else SHARE * abs(contrast["means"][1])
    ruled_out = most is not None and (most if better else -most) <= margin
    return "holds" if ruled_out else "undecided"


def _of_diverged(contrast: Mapping[str, Any]) -> str:
    """Judge a contrast without numbers: what diverged is worse than what did not."""
    first, second = (contrast[side] in contrast["diverged"] for side in ("cell", "against"))
    if first and second:
        return "undecided"
    if contrast["expect"] == "better":
        return "does not hold" if first else "undecided"
    if first and contrast["cell"] in contrast.get("diverged_at_home", ()):
        return "undecided" if contrast["test"] is not None else "holds"
    return "holds" if first else "does not hold"


def _side(interval: Mapping[str, Any], *, higher_is_better: bool) -> str:
    low, high = interval["low"], interval["high"]
    if low is not None and low > 0:
        return "better" if higher_is_better else "worse"
    if high is not None and high < 0:
        return "worse" if higher_is_better else "better"
    return "neither"
