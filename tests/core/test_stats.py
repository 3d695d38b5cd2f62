"""Intervals and tests against scipy, closed forms, naive loops and simulated coverage."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats as oracle

from torchemo.core.errors import ConfigError, DataError, ShapeError
from torchemo.core.stats import (
    Estimate,
    mean_interval,
    median_interval,
    paired_difference,
    seeds_by_tasks,
    sign_flip_p_value,
    summarise,
    summarise_by_group,
    t_interval,
)


def contains(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


def within_binomial_error(hits, expected, *, errors=3.0):
    return abs(np.mean(hits) - expected) < errors * math.sqrt(expected * (1 - expected) / len(hits))


def draws(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def test_mean_interval_is_the_fields_formula():
    values = [0.5, 0.6, 0.4, 0.9, 0.1]
    mean = sum(values) / 5
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / 5)
    estimate = mean_interval(values)
    assert estimate.value == pytest.approx(mean)
    assert estimate.half_width == pytest.approx(1.96 * std / math.sqrt(5))
    assert estimate.n == 5


def test_mean_interval_of_binomial_tasks_has_the_published_width():
    rng = np.random.default_rng(0)
    accuracies = rng.binomial(25, 0.54, size=1000) / 25
    expected = 1.96 * math.sqrt(0.54 * 0.46 / 25 / 1000)
    assert mean_interval(accuracies).half_width == pytest.approx(expected, rel=0.08)


def test_one_task_gives_no_interval():
    estimate = mean_interval([0.5])
    assert (estimate.low, estimate.high) == (-math.inf, math.inf)
    assert json.loads(json.dumps(estimate.to_dict(), allow_nan=False))["low"] is None


@pytest.mark.parametrize("n", [10, 200])
def test_coverage_of_the_mean_interval_is_what_student_says(n):
    hits = [contains(mean_interval(row), 0.0) for row in draws(n, 2000, n)]
    expected = 1 - 2 * oracle.t.sf(1.96 * math.sqrt((n - 1) / n), n - 1)
    assert within_binomial_error(hits, expected)


def test_t_interval_agrees_with_scipy_and_covers():
    values = draws(0, 7)
    low, high = oracle.ttest_1samp(values, 0.0).confidence_interval(0.95)
    estimate = t_interval(values)
    assert (estimate.low, estimate.high) == (pytest.approx(low), pytest.approx(high))
    hits = [contains(t_interval(row), 0.0) for row in draws(1, 1000, 3)]
    assert within_binomial_error(hits, 0.95)


def order_statistics(n):
    """Return the widest rank r (from 0) with P(Binomial(n, 1/2) <= r) <= 0.025, or None."""
    ranks = [r for r in range(n) if sum(math.comb(n, i) for i in range(r + 1)) <= 0.025 * 2**n]
    return max(ranks, default=None)


@pytest.mark.parametrize("n", [1, 5, 6, 9, 25, 100])
def test_median_interval_is_a_pair_of_order_statistics(n):
    values = draws(n, n)
    estimate, ranked, rank = median_interval(values), np.sort(values), order_statistics(n)
    assert estimate.value == np.median(values)
    expected = (-math.inf, math.inf) if rank is None else (ranked[rank], ranked[n - 1 - rank])
    assert (estimate.low, estimate.high) == expected


def test_median_interval_covers_the_median_of_a_heavy_tailed_error():
    errors = np.random.default_rng(0).standard_cauchy((400, 40)) ** 2
    hits = [contains(median_interval(row), 1.0) for row in errors]
    rank = order_statistics(40)
    assert within_binomial_error(hits, 1 - 2 * oracle.binom.cdf(rank, 40, 0.5))


def naive_sign_flip(differences):
    observed = abs(sum(differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product([1, -1], repeat=len(differences))
    ]
    return sum(total >= observed - 1e-9 for total in sums) / len(sums)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_sign_flip_test_of_few_tasks_is_exact(n):
    differences = draws(n, n) + 0.5
    p_value = sign_flip_p_value(differences)
    assert p_value == pytest.approx(naive_sign_flip(differences.tolist()), abs=1e-12)
    if n > 1:
        scipys = oracle.permutation_test(
            (differences, np.zeros(n)),
            lambda x, y, axis: np.mean(x - y, axis=axis),
            permutation_type="samples",
            vectorized=True,
        )
        assert p_value == pytest.approx(scipys.pvalue, abs=1e-12)


def test_sign_flip_test_counts_ties_of_rounded_accuracies():
    differences = [0.1, 0.2, -0.3, 0.1, 0.1, 0.0, -0.2, 0.3]
    assert sign_flip_p_value(differences) == pytest.approx(naive_sign_flip(differences), abs=1e-12)
    assert sign_flip_p_value([0.0] * 50) == 1.0


def test_sign_flip_test_of_many_tasks_approaches_the_exact_answer():
    differences = draws(3, 13) + 0.35
    exact = naive_sign_flip(differences.tolist())
    drawn = sign_flip_p_value(differences, resamples=8191)
    assert drawn != exact
    assert abs(drawn - exact) < 4 * math.sqrt(exact / 8191)


def test_sign_flip_test_agrees_with_students_t_on_many_normal_tasks():
    differences = draws(5, 1000) + 0.06
    expected = oracle.ttest_1samp(differences, 0.0).pvalue
    assert 0.01 < expected < 0.2
    p_value = sign_flip_p_value(differences, resamples=20_000)
    assert p_value == pytest.approx(expected, abs=4 * math.sqrt(expected / 20_000))


def test_sign_flip_test_rejects_a_true_null_as_often_as_it_says():
    rejections = [sign_flip_p_value(row, resamples=199) <= 0.05 for row in draws(7, 1000, 30)]
    assert within_binomial_error(rejections, 0.05)


def test_sign_flip_test_is_never_zero_and_depends_on_the_seed_alone():
    certain = draws(0, 100) * 0.01 + 1.0
    assert sign_flip_p_value(certain, resamples=999) == pytest.approx(1 / 1000)
    differences = draws(1, 100) + 0.1
    assert sign_flip_p_value(differences, seed=1) == sign_flip_p_value(differences, seed=1)
    assert sign_flip_p_value(differences, seed=1) != sign_flip_p_value(differences, seed=2)


def test_paired_difference_removes_the_variance_between_tasks():
    hardness = draws(0, 300)
    first, second = hardness + 0.1 * draws(1, 300) + 0.05, hardness + 0.1 * draws(2, 300)
    result = paired_difference(first, second)
    low, high = oracle.ttest_rel(first, second).confidence_interval(0.95)
    assert (result.difference.low, result.difference.high) == (
        pytest.approx(low),
        pytest.approx(high),
    )
    assert result.difference.half_width < mean_interval(first).half_width / 4
    assert result.p_value < 0.001
    assert result.median == pytest.approx(float(np.median(first - second)))
    assert result.wins == sum(a > b for a, b in zip(first, second, strict=True))
    assert result.wins + result.losses + result.ties == 300


def test_paired_difference_of_a_method_with_itself_is_nothing():
    scores = draws(0, 40)
    result = paired_difference(scores, scores)
    assert (result.difference.value, result.p_value, result.ties) == (0.0, 1.0, 40)


def crossed(rng, *, seeds, tasks, seed_std, task_std, noise_std):
    return (
        seed_std * rng.standard_normal((seeds, 1))
        + task_std * rng.standard_normal((1, tasks))
        + noise_std * rng.standard_normal((seeds, tasks))
    )


def test_intervals_over_tasks_and_seeds_are_the_one_way_intervals_of_the_means():
    scores = draws(0, 4, 60)
    result = seeds_by_tasks(scores, resamples=50)
    assert result.over_tasks == mean_interval(scores.mean(axis=0))
    assert result.over_seeds == t_interval(scores.mean(axis=1))
    assert result.both.value == pytest.approx(scores.mean())


def test_interval_over_both_reduces_to_the_source_that_varies():
    seeds, tasks = draws(0, 4, 1), draws(1, 1, 60)
    only_seeds = seeds_by_tasks(seeds + np.zeros((4, 60)), resamples=50)
    assert only_seeds.both.half_width == pytest.approx(t_interval(seeds[:, 0]).half_width)
    only_tasks = seeds_by_tasks(tasks + np.zeros((4, 60)), resamples=50)
    assert only_tasks.both.half_width == pytest.approx(t_interval(tasks[0]).half_width)
    together = seeds_by_tasks(seeds + tasks, resamples=50).both.half_width
    parts = t_interval(seeds[:, 0]).half_width, t_interval(tasks[0]).half_width
    assert together == pytest.approx(math.hypot(*parts))


def test_interval_over_both_covers_when_one_source_dominates_and_others_do_not():
    rng = np.random.default_rng(0)
    sizes = {"seeds": 3, "tasks": 50, "task_std": 0.5, "noise_std": 1.0}
    results = [seeds_by_tasks(crossed(rng, seed_std=1.0, **sizes), resamples=1) for _ in range(500)]
    assert within_binomial_error([contains(r.both, 0.0) for r in results], 0.95)
    assert np.mean([contains(r.over_tasks, 0.0) for r in results]) < 0.5


@pytest.mark.parametrize(("seed_std", "task_std", "noise_std"), [(0.1, 1.0, 1.0), (0.2, 1.0, 0.1)])
def test_interval_over_both_is_at_most_conservative_when_sources_are_even(
    seed_std, task_std, noise_std
):
    rng = np.random.default_rng(1)
    spreads = {"seed_std": seed_std, "task_std": task_std, "noise_std": noise_std}
    samples = [crossed(rng, seeds=3, tasks=50, **spreads) for _ in range(400)]
    hits = [contains(seeds_by_tasks(sample, resamples=1).both, 0.0) for sample in samples]
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / 400) < np.mean(hits) < 0.995


def naive_two_level_bootstrap(scores, rng, resamples):
    n_seeds, n_tasks = len(scores), len(scores[0])
    means = []
    for _ in range(resamples):
        rows = [rng.integers(n_seeds) for _ in range(n_seeds)]
        columns = [rng.integers(n_tasks) for _ in range(n_tasks)]
        means.append(sum(scores[r][c] for r in rows for c in columns) / (n_seeds * n_tasks))
    return np.quantile(means, [0.025, 0.975])


def test_two_level_bootstrap_agrees_with_a_naive_loop():
    scores = crossed(
        np.random.default_rng(2), seeds=6, tasks=20, seed_std=1.0, task_std=3.0, noise_std=1.0
    )
    low, high = naive_two_level_bootstrap(scores.tolist(), np.random.default_rng(3), 3000)
    estimate = seeds_by_tasks(scores, resamples=20_000).bootstrap
    assert estimate.low == pytest.approx(low, abs=0.1 * (high - low) / 2)
    assert estimate.high == pytest.approx(high, abs=0.1 * (high - low) / 2)


def test_two_level_bootstrap_covers_with_many_seeds_and_repeats_itself():
    rng = np.random.default_rng(4)
    spreads = {"seed_std": 0.5, "task_std": 1.0, "noise_std": 0.5}
    samples = [crossed(rng, seeds=30, tasks=60, **spreads) for _ in range(150)]
    hits = [contains(seeds_by_tasks(x, resamples=300).bootstrap, 0.0) for x in samples]
    assert within_binomial_error(hits, 0.95)
    again = [seeds_by_tasks(samples[0], seed=9, resamples=600).bootstrap for _ in range(2)]
    assert again[0] == again[1]
    assert again[0] != seeds_by_tasks(samples[0], seed=8, resamples=600).bootstrap


def test_groups_are_summarised_one_by_one():
    values, groups = draws(0, 90) + np.repeat([0.0, 10.0, 20.0], 30), [0] * 30 + [1] * 30 + [2] * 30
    table = summarise_by_group(values, groups, names=["sine", "line", "cubic"])
    assert list(table.groups) == ["sine", "line", "cubic"]
    assert table.groups["line"] == summarise(values[30:60])
    assert table.overall == summarise(values)
    errors = [values[i : i + 30].std() / math.sqrt(30) for i in (0, 30, 60)]
    assert table.macro.value == pytest.approx(values.mean())
    assert table.macro.half_width == pytest.approx(1.96 * math.sqrt(sum(e**2 for e in errors)) / 3)
    assert table.macro.half_width < table.overall.mean.half_width / 5


def test_every_group_counts_the_same_in_the_macro_mean():
    table = summarise_by_group([0.0, 0.0, 0.0, 1.0], np.array([4, 4, 4, 7]))
    assert list(table.groups) == ["4", "7"]
    assert table.macro.value == 0.5
    assert table.overall.mean.value == 0.25


def test_results_are_plain_enough_for_json():
    x = np.random.default_rng(0).standard_normal(12)
    results = [
        mean_interval(x),
        paired_difference(x, -x),
        seeds_by_tasks([x, -x], resamples=20),
        summarise(x[:3]),
        summarise_by_group(x, [0, 1, 2] * 4),
    ]
    for result in results:
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False)) == result.to_dict()
    assert results[3].to_dict()["median"]["high"] is None
    assert results[1].to_dict()["difference"]["n"] == 12


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_refused_with_its_task(bad):
    with pytest.raises(DataError, match="task 2"):
        mean_interval([0.1, 0.2, bad])


def test_scores_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="equal length"):
        paired_difference([0.1, 0.2], [0.1, 0.2, 0.3])
    with pytest.raises(ShapeError, match="2 or more"):
        t_interval([0.1])
    with pytest.raises(ShapeError, match="1 or more"):
        mean_interval([])
    with pytest.raises(ShapeError, match="at least 2 seeds"):
        seeds_by_tasks([[0.1, 0.2]])
    with pytest.raises(ShapeError, match=r"\[2, 3\] tasks"):
        seeds_by_tasks([[0.1, 0.2], [0.1, 0.2, 0.3]])
    with pytest.raises(ShapeError, match="one group id per task"):
        summarise_by_group([0.1, 0.2], [0])


def test_options_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        sign_flip_p_value([0.1, 0.2], resamples=0)
    with pytest.raises(ConfigError, match="at least 1"):
        seeds_by_tasks([[0.1, 0.2], [0.3, 0.5]], resamples=0)
    with pytest.raises(ConfigError, match="distinct"):
        summarise_by_group([0.1, 0.2], [0, 1], names=["a", "a"])
    with pytest.raises(ConfigError, match="cover"):
        summarise_by_group([0.1, 0.2], [0, 2], names=["a", "b"])
