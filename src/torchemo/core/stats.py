"""Statistics of few-shot results: intervals over tasks, over seeds, and paired tests.

Sources of chance are kept apart, because an interval over one says nothing about the others: which test
tasks were drawn (`mean_interval`, as the field reports), and which training seed was used
(`seeds_by_tasks`). Which classes the data set happens to hold is in none of these intervals. Methods are
compared on the same tasks (`paired_difference`), which removes most of the variance between tasks.

Wherever something is drawn, ``seed`` alone decides what, and ``resamples`` says how often.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, final

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from torchemo.core.errors import ConfigError, DataError, ShapeError
from torchemo.core.rng import seed_for

Scores: TypeAlias = Sequence[float] | Float[np.ndarray, " task"]
"""One number per task: accuracy or error."""

RESAMPLES = 9999
_CHUNK = 512


@final
@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    Attributes:
        value: The estimate.
        low: Lower end; minus infinity where the data allow no interval.
        high: Upper end; infinity where the data allow no interval.
        n: How many independent units the interval is made of.
        method: How the interval was made.
    """

    value: float
    low: float
    high: float
    n: int
    method: str

    @property
    def half_width(self) -> float:
        """Half the length of the interval: the number after the plus-minus sign."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which knows no infinity: an open end is None."""
        return _plain(asdict(self))


def mean_interval(values: Scores) -> Estimate:
    """Return mean ± 1.96 std / sqrt(T) over T tasks, std with ddof 0: the field's convention.

    One task allows no interval: its ends are infinite.

    Example:
        >>> print(mean_interval([0.2, 0.4, 0.6, 0.8]))
        0.5 [0.2809, 0.7191]
    """
    x = _checked(values, at_least=1)
    error = float(x.std()) / math.sqrt(len(x)) if len(x) > 1 else math.inf
    return _around(float(x.mean()), 1.96 * error, len(x), "1.96 se")


def t_interval(values: Scores) -> Estimate:
    """Return the mean with Student's 95 % interval, for few values (seeds) or differences."""
    x = _checked(values, at_least=2)
    error = float(x.std(ddof=1)) / math.sqrt(len(x))
    return _around(float(x.mean()), float(stats.t.ppf(0.975, len(x) - 1)) * error, len(x), "t")


def median_interval(values: Scores) -> Estimate:
    """Return the median with its distribution-free 95 % interval from order statistics.

    The interval assumes nothing about the tails, so it suits regression errors. Fewer than 6 values
    cannot bound a median at 95 %: the ends are then infinite.
    """
    x = _checked(values, at_least=1)
    low, high = stats.quantile_test(x, p=0.5).confidence_interval(0.95)
    low, high = (-math.inf, math.inf) if math.isnan(low) else (float(low), float(high))
    return Estimate(float(np.median(x)), low, high, len(x), "order statistics")


@final
@dataclass(frozen=True)
class PairedDifference:
    """First minus second on the same tasks.

    Attributes:
        difference: Mean difference with its t interval.
        median: Median difference.
        p_value: Two-sided sign-flip test of no difference.
        wins: Tasks on which the first is larger.
        ties: Tasks on which both are equal.
        losses: Tasks on which the first is smaller.
    """

    difference: Estimate
    median: float
    p_value: float
    wins: int
    ties: int
    losses: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return _plain(asdict(self))


def paired_difference(
    first: Scores, second: Scores, *, seed: int = 0, resamples: int = RESAMPLES
) -> PairedDifference:
    """Compare the scores of two methods on the same tasks, in the same order."""
    a, b = _checked(first, at_least=2), _checked(second, at_least=2)
    if len(a) != len(b):
        raise ShapeError(
            f"paired scores should have equal length, got {len(a)} and {len(b)}.",
            hint="Evaluate both methods on the same list of tasks.",
        )
    return PairedDifference(
        difference=t_interval(a - b),
        median=float(np.median(a - b)),
        p_value=sign_flip_p_value(a - b, seed=seed, resamples=resamples),
        wins=int((a > b).sum()),
        ties=int((a == b).sum()),
        losses=int((a < b).sum()),
    )


def sign_flip_p_value(differences: Scores, *, seed: int = 0, resamples: int = RESAMPLES) -> float:
    """Test that paired differences are symmetric about 0, two-sided, by flipping their signs.

    Exact when all 2^T sign patterns number at most ``resamples``; otherwise patterns are drawn and
    the observed one is counted among them, so the p-value is valid and never 0.
    """
    d = _checked(differences, at_least=1)
    exact = 2 ** len(d) <= resamples
    patterns = 2 ** len(d) if exact else resamples
    chunks = len(_chunks(patterns))
    bits, words_per_row = np.random.Philox(key=seed_for(seed, "sign-flip")), -(-len(d) // 64)
    drawn = np.arange(patterns)[:, None] if exact else bits.random_raw((patterns, words_per_row))
    # Rounding must not split ties: flipped sums within it count as equal to the observed one.
    threshold = abs(d.sum()) - 1e-12 * np.abs(d).sum()
    as_extreme = 0
    for words in np.array_split(drawn.astype("<u8").view(np.uint8), chunks):
        flips = np.unpackbits(words, axis=1, count=len(d), bitorder="little")
        sums = d.sum() - 2 * (flips.astype(np.float64) @ d)
        as_extreme += int((np.abs(sums) >= threshold).sum())
    return as_extreme / patterns if exact else (as_extreme + 1) / (patterns + 1)


@final
@dataclass(frozen=True)
class SeedsByTasks:
    """Mean over training seeds and test tasks, with an interval for each source of chance.

    Attributes:
        over_tasks: Seeds held fixed: 1.96 standard errors over the tasks' means.
        over_seeds: Tasks held fixed: t interval over the seeds' means.
        both: New seeds and new tasks: seeds and tasks as random effects, widths in quadrature.
        bootstrap: New seeds and new tasks: seeds and tasks resampled, percentiles.
    """

    over_tasks: Estimate
    over_seeds: Estimate
    both: Estimate
    bootstrap: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return _plain(asdict(self))


def seeds_by_tasks(
    scores: Sequence[Scores] | Float[np.ndarray, "seed task"],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> SeedsByTasks:
    """Estimate the mean of ``scores[seed][task]``, where all seeds saw the same tasks.

    To compare two methods, give their differences ``a - b``. With few seeds read `both`: the
    bootstrap cannot see more spread than the seeds at hand show and is then too short.
    """
    lengths = {len(row) for row in scores}
    if len(scores) < 2 or len(lengths) != 1 or min(lengths) < 2:
        raise ShapeError(
            "scores should hold at least 2 seeds, each with the same 2 or more tasks;"
            f" got {len(scores)} seeds with {sorted(lengths)} tasks.",
            hint="With one seed use mean_interval, and say that it says nothing about seeds.",
        )
    x = np.stack([_checked(row, at_least=2) for row in scores])
    return SeedsByTasks(
        over_tasks=mean_interval(x.mean(axis=0)),
        over_seeds=t_interval(x.mean(axis=1)),
        both=_random_effects(x),
        bootstrap=_two_level_bootstrap(x, seed=seed, resamples=resamples),
    )


@final
@dataclass(frozen=True)
class Summary:
    """Mean and median of one set of tasks, each with its interval."""

    mean: Estimate
    median: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return _plain(asdict(self))


@final
@dataclass(frozen=True)
class GroupTable:
    """Summaries per group (domain, regression family), in the order of the groups' ids.

    Attributes:
        groups: Summary of each group by name.
        overall: Summary of all tasks together.
        macro: Mean of the groups' means, every group counting the same.
    """

    groups: dict[str, Summary]
    overall: Summary
    macro: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return _plain(asdict(self))


def summarise(values: Scores) -> Summary:
    """Return mean and median with their intervals."""
    return Summary(mean=mean_interval(values), median=median_interval(values))


def summarise_by_group(
    values: Scores,
    groups: Sequence[int] | Int[np.ndarray, " task"],
    *,
    names: Sequence[str] | None = None,
) -> GroupTable:
    """Summarise tasks group by group.

    Args:
        values: One number per task.
        groups: Group id of each task (`Episode.domain`).
        names: Names of groups 0, 1, ...; the ids themselves by default.
    """
    x, ids = _checked(values, at_least=1), np.asarray(groups)
    if ids.shape != x.shape:
        raise ShapeError(f"expected one group id per task ({len(x)}), got shape {list(ids.shape)}.")
    labels = [str(i) for i in range(int(ids.max()) + 1)] if names is None else list(names)
    if ids.min() < 0 or ids.max() >= len(labels) or len(set(labels)) < len(labels):
        raise ConfigError(
            f"names should be distinct and cover groups {np.unique(ids).tolist()}, got {labels}."
        )
    rows = {labels[group]: summarise(x[ids == group]) for group in np.unique(ids)}
    errors = [row.mean.half_width for row in rows.values()]
    macro = float(np.mean([row.mean.value for row in rows.values()]))
    return GroupTable(
        groups=rows,
        overall=summarise(x),
        macro=_around(macro, math.hypot(*errors) / len(rows), len(x), "1.96 se, stratified"),
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    nested = {k: _plain(v) if isinstance(v, dict) else v for k, v in values.items()}
    return {k: None if v in (math.inf, -math.inf) else v for k, v in nested.items()}


def _random_effects(x: Float[np.ndarray, "seed task"]) -> Estimate:
    """Add in quadrature the t half-width over seeds and that of the variance between tasks."""
    S, T = x.shape
    over_seeds = t_interval(x.mean(axis=1))
    residual = x - x.mean(axis=1, keepdims=True) - x.mean(axis=0, keepdims=True) + x.mean()
    # Means over S seeds differ between tasks by the tasks and by the residual, which seeds hold already.
    noise = float(np.square(residual).sum()) / ((S - 1) * (T - 1)) / S
    tasks = max(float(x.mean(axis=0).var(ddof=1)) - noise, 0.0) / T
    over_tasks = float(stats.t.ppf(0.975, T - 1)) * math.sqrt(tasks)
    half_width = math.hypot(over_seeds.half_width, over_tasks)
    return _around(over_seeds.value, half_width, S, "random effects")


def _two_level_bootstrap(
    x: Float[np.ndarray, "seed task"], *, seed: int, resamples: int
) -> Estimate:
    """Resample seeds and tasks, and return the percentiles of the mean."""
    (S, T), method = x.shape, "two-level bootstrap"
    rng = np.random.Generator(np.random.Philox(key=seed_for(seed, method)))
    drawn = [
        ((_counts(rng, S, n) @ x) * _counts(rng, T, n)).sum(axis=1) / (S * T)
        for n in _chunks(resamples)
    ]
    low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975])
    return Estimate(float(x.mean()), float(low), float(high), S, method)


def _counts(rng: np.random.Generator, units: int, resamples: int) -> Float[np.ndarray, "r u"]:
    """Draw ``units`` of ``units`` with replacement; return how often each was drawn."""
    drawn = rng.integers(units, size=(resamples, units)) + units * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=units * resamples)
    return counts.reshape(resamples, units).astype(np.float64)


def _around(value: float, half_width: float, n: int, method: str) -> Estimate:
    return Estimate(value, value - half_width, value + half_width, n, method)


def _chunks(resamples: int) -> list[int]:
    """Split ``resamples`` into counts whose arrays fit in memory."""
    if resamples < 1:
        raise ConfigError(f"resamples should be at least 1, got {resamples}.")
    return [min(_CHUNK, resamples - start) for start in range(0, resamples, _CHUNK)]


def _checked(values: Scores, *, at_least: int) -> Float[np.ndarray, " task"]:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) < at_least:
        raise ShapeError(f"expected {at_least} or more numbers, got shape {list(x.shape)}.")
    if not np.isfinite(x).all():
        task = int(np.flatnonzero(~np.isfinite(x))[0])
        raise DataError(
            f"score of task {task} should be finite, got {x[task]}.",
            hint="A diverged task must be reported, not averaged away.",
        )
    return x
