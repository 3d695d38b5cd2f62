"""The rules by which numbers become verdicts."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from torchemo.report.format import METRICS

Verdict: TypeAlias = Literal["holds", "does not hold", "undecided", "not testable here", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

POINTS, SHARE = 0.01, 0.1
"""No better means: better by no more than a point of accuracy, or a tenth of the error."""

RULE = """\
A contrast is the mean paired difference on the same test tasks. Its interval is the 95 % interval
over seeds and tasks (random effects). With one seed it is over tasks.

Intervals suppose that differences between seeds are normal, which three seeds cannot show. They
speak of other seeds and other tasks of the same test classes, not of other classes. They are not
corrected for their number.

- 'Better' holds if the whole interval lies on the better side of zero, 'worse' if it lies on the
  worse side. A difference that is not significant does not hold. 'At least as good' follows the
  same rule as 'better'.
- 'No better' holds if the interval rules out a gain of more than a point, or a tenth of the error.
  It does not hold if there is a significant gain. Otherwise it is undecided.
- With one seed nothing holds: what would is undecided.
- A cell that diverges is not better than any other, and it is worse than a cell that does not. If it
  diverged at home, that is no proof of harm elsewhere. A control that diverges decides nothing.
- A claim holds if all its contrasts hold. It does not hold if one does not. It is undecided if one
  is, or was not run."""
"""Stated wherever verdicts are given."""

OTHER_RULES = """\
Entries with rules of their own:

- T1 must hold on all tasks and, over tasks, on every domain.
- T7 and T8 compare ARML with memory to ARML and MAML, and ARML and HSML to MAML. Other learners
  are in their tables alone.
- F1 compares the median training loss of the last window of the first seed.
- F4 compares the means of its matrix column by column.
- T6 compares the parameters (at most twice the printed ones).
- F6 compares the median time of an inner step (at most twice that of SGD; the paper's ratio is 1.5).

F1, F4, T6 and F6 have no intervals."""
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
