"""How a report writes numbers, metrics and methods."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, final

from markupsafe import Markup, escape

from torchemo.config.run import RunConfig
from torchemo.core.errors import DataError
from torchemo.memory import MEMORIES

MINUS = "\N{MINUS SIGN}"


@final
@dataclass(frozen=True)
class Metric:
    """How a metric is written and which way is better.

    Attributes:
        name: Its name.
        mean: What its mean over tasks is called.
        unit: What stands at an axis.
        difference: What stands at an axis of differences.
        scale: What scores are multiplied by.
        decimals: Digits after the point; None to let the number decide.
        higher_is_better: Which way is better.
    """

    name: str
    mean: str
    unit: str
    difference: str
    scale: float
    decimals: int | None
    higher_is_better: bool

    def write(self, value: float | None, *, sign: bool = False, open_end: str = "∞") -> str:
        """Write a score or a difference of scores."""
        if value is None or math.isinf(value):
            return open_end
        return number(self.scale * value, sign=sign, decimals=self.decimals)

    def interval(self, low: float | None, high: float | None, *, sign: bool = False) -> str:
        """Write an interval; an end that is None or infinite is open."""
        ends = (self.write(low, sign=sign, open_end=f"{MINUS}∞"), self.write(high, sign=sign))
        return f"[{ends[0]}, {ends[1]}]"


METRICS = {
    "accuracy": Metric(
        name="accuracy",
        mean="mean accuracy",
        unit="accuracy (%)",
        difference="difference, percentage points",
        scale=100.0,
        decimals=2,
        higher_is_better=True,
    ),
    "mse": Metric(
        name="squared error",
        mean="mean squared error",
        unit="mean squared error",
        difference="difference in mean squared error",
        scale=1.0,
        decimals=None,
        higher_is_better=False,
    ),
}


def metric_of(name: str) -> Metric:
    """Return how a metric is written."""
    if name not in METRICS:
        raise DataError(f"unknown metric '{name}'.", hint=f"Known: {', '.join(METRICS)}.")
    return METRICS[name]


def number(value: float, *, sign: bool = False, decimals: int | None = None) -> str:
    """Write a number with three or four digits that matter, or with so many after the point.

    Example:
        >>> [number(v) for v in (1234.5, 12.345, 0.01234, 0.0, -0.5)]
        ['1,234', '12.35', '0.0123', '0', '−0.500']
    """
    size = abs(value)
    if decimals is not None:
        text = f"{size:.{decimals}f}"
    elif size >= 1000:
        text = f"{size:,.0f}"
    elif size >= 100:
        text = f"{size:.1f}"
    elif size >= 1:
        text = f"{size:.2f}"
    elif size >= 0.1:
        text = f"{size:.3f}"
    elif size >= 0.001:
        text = f"{size:.4f}"
    else:
        text = f"{size:.2e}"
    if value == 0:
        return "0"
    return (MINUS if value < 0 else "+" if sign else "") + text


def p_value(value: float) -> str:
    """Write a p-value; very small ones as a bound."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def breakable(text: str) -> Markup:
    """Escape a name and allow lines to be broken after its underscores."""
    return escape(text).replace("_", Markup("_<wbr>"))


def memory_of(config: RunConfig) -> Any:
    """Return the class of a run's memory; None if the run has none, or one without slots."""
    kind = MEMORIES[config.memory.name]
    slots = config.memory.options.get("capacity", 1)
    return kind if slots and hasattr(kind, "title") else None


def method_of(config: RunConfig) -> str:
    """Name the learner and how it remembers: "MAML", "MAML + EMO", "MAML + offsets"."""
    from torchemo.learners.build import learner_title  # brings torch

    learner, memory = learner_title(config.learner), memory_of(config)
    return learner if memory is None else f"{learner} + {memory.title}"


def unequal_steps(found: Mapping[str, Any], *, base: str, other: str) -> str | None:
    """Say that two methods had different numbers of outer steps; None if they had not, or nobody knows."""
    sides = [found[side].get("outer_steps") for side in ("base", "other")]
    if None in sides or sides[0] == sides[1]:
        return None
    first, second = (" or ".join(f"{n:,}" for n in steps) for steps in sides)
    return f"They had different numbers of outer steps: {base} {first}, {other} {second}."


def side_names(comparison: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the base and the others; equal methods are told apart by their runs, or else by number."""
    sides = [comparison[0]["base"], *(found["other"] for found in comparison)]
    methods = [str(side["method"]) for side in sides]
    runs = [str((side.get("runs") or [""])[0]) for side in sides]
    folders = [PurePath(run).name for run in runs]
    names = []
    for i, method in enumerate(methods):
        if methods.count(method) == 1:
            names.append(method)
        elif folders[i] and folders.count(folders[i]) == 1:
            names.append(f"{method} ({folders[i]})")
        elif runs[i] and runs.count(runs[i]) == 1:
            names.append(f"{method} ({place(runs[i])})")
        else:
            names.append(f"{method} ({i})")
    return names


NOT_NOTED = "not noted"
"""What stands for a cost that a result of an earlier version does not have."""


def cost_of(side: Mapping[str, Any]) -> dict[str, str]:
    """Write what a side of a comparison took to train: outer steps, and CPU seconds of a run."""
    steps, seconds = side.get("outer_steps"), side.get("cpu_seconds")
    return {
        "outer_steps": " or ".join(f"{n:,}" for n in steps) if steps else NOT_NOTED,
        "cpu_seconds": NOT_NOTED if seconds is None else number(float(seconds)),
    }


def data_of(config: RunConfig) -> str:
    """Name the tasks: folders by their last part, because a report is shown to others."""
    return ", ".join(PurePath(source).name for source in config.data.source)


def place(path: str) -> str:
    """Shorten a path to its last two parts."""
    return "/".join(PurePath(path).parts[-2:])


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Write nested options as ``a.b.c``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
