"""Regression families against naive formulas, least squares and their published distributions."""

import math

import numpy as np
import pytest
import torch
from scipy import stats as oracle

from torchemo.core.errors import ConfigError
from torchemo.data.synthetic.regression import (
    FAMILIES,
    RegressionSpec,
    regression_targets,
    regression_tasks,
    sample_regression,
)

GROUPS = ["sinusoid", "hsml4", "arml6"]
TWO_PI = 2 * math.pi
PUBLISHED = {
    ("sinusoid", "sine"): [(0.1, 5), (0, math.pi)],
    ("hsml4", "sine"): [(0.1, 5), (0.8, 1.2), (0, TWO_PI)],
    ("arml6", "sine"): [(0.1, 5), (0.8, 1.2), (0, TWO_PI)],
    ("any", "line"): [(-3, 3), (-3, 3)],
    ("any", "quadratic"): [(-0.2, 0.2), (-2, 2), (-3, 3)],
    ("any", "cubic"): [(-0.1, 0.1), (-0.2, 0.2), (-2, 2), (-3, 3)],
    ("arml6", "quadratic_surface"): [(-1, 1), (-1, 1)],
    ("arml6", "ripple"): [(-0.2, 0.2), (-3, 3)],
}


def published_ranges(group, family):
    return PUBLISHED.get((group, family)) or PUBLISHED["any", family]


def naive(group, family, c, x):
    """Evaluate one function at one point, with the math module alone."""
    if family == "sine":
        if group == "sinusoid":
            return c[0] * math.sin(x[0] - c[1])
        if group == "hsml4":
            return c[0] * math.sin(c[1] * x[0]) + c[2]
        return c[0] * math.sin(c[1] * x[0] + c[2])
    if family in ("line", "quadratic", "cubic"):
        degree = {"line": 1, "quadratic": 2, "cubic": 3}[family]
        return sum(c[i] * x[0] ** (degree - i) for i in range(degree + 1))
    if family == "quadratic_surface":
        return c[0] * x[0] ** 2 + c[1] * x[1] ** 2
    return math.sin(-c[0] * (x[0] ** 2 + x[1] ** 2)) + c[1]


def draw(spec, *, seed=0, split="train", start=0, count=8, dtype=torch.float32):
    return sample_regression(spec, seed, split=split, start=start, count=count, dtype=dtype)


def tensors(episode):
    return [*episode.support, *episode.query, episode.domain, episode.index]


@pytest.mark.parametrize("group", GROUPS)
def test_targets_equal_the_published_formulas_point_by_point(group):
    spec = RegressionSpec(group, n_shot=3, n_query=4, noise=0.0)
    episode = draw(spec, count=60, dtype=torch.float64)
    tasks = regression_tasks(spec, 0, split="train", start=0, count=60)
    assert set(tasks.family.tolist()) == set(range(len(spec.families)))
    for batch in (episode.support, episode.query):
        for b, family in enumerate(tasks.family.tolist()):
            c = tasks.coefficients[b].tolist()
            for x, y in zip(batch.x[b].tolist(), batch.y[b].tolist(), strict=True):
                expected = naive(group, spec.families[family], c, x)
                assert y[0] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_polynomials_are_recovered_from_the_points_alone():
    spec = RegressionSpec("hsml4", n_shot=6, n_query=6)
    episode = draw(spec, count=40, dtype=torch.float64)
    for b, family in enumerate(episode.domain.tolist()):
        x = torch.cat([episode.support.x[b, :, 0], episode.query.x[b, :, 0]]).numpy()
        y = torch.cat([episode.support.y[b, :, 0], episode.query.y[b, :, 0]]).numpy()
        if family == 0:
            continue
        fitted = np.polynomial.polynomial.polyfit(x, y, family)[::-1]
        np.testing.assert_allclose(np.polyval(fitted, x), y, atol=1e-9)
        ranges = published_ranges("hsml4", spec.families[family])
        assert all(low <= c <= high for c, (low, high) in zip(fitted, ranges, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", GROUPS)
def test_an_episode_does_not_depend_on_the_batch_it_is_drawn_in(group, dtype):
    spec = RegressionSpec(group, n_shot=5, n_query=7)
    batch = draw(spec, seed=3, count=64, dtype=dtype)
    for start, count in [(0, 8), (5, 1), (13, 50), (63, 1)]:
        part = draw(spec, seed=3, start=start, count=count, dtype=dtype)
        for whole, piece in zip(tensors(batch), tensors(part), strict=True):
            assert torch.equal(whole[start : start + count], piece)


@pytest.mark.parametrize("group", GROUPS)
def test_seeds_splits_and_indices_give_different_episodes(group):
    spec = RegressionSpec(group)
    first = draw(spec, count=2).support.x
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, draw(spec, count=2, seed=1).support.x)
    assert not torch.equal(first, draw(spec, count=2, split="test").support.x)
    assert not torch.equal(first, draw(spec, count=2, split="val").support.x)


@pytest.mark.parametrize("group", GROUPS)
def test_shapes_types_and_marks_are_those_of_an_episode(group):
    spec = RegressionSpec(group, n_shot=5, n_query=9)
    episode = draw(spec, start=11, count=4)
    dim = 2 if group == "arml6" else 1
    assert spec.input_dim == dim
    assert episode.support.x.shape == (4, 5, dim)
    assert episode.query.x.shape == (4, 9, dim)
    assert episode.support.y.shape == (4, 5, 1)
    assert episode.query.y.shape == (4, 9, 1)
    assert episode.index.tolist() == [11, 12, 13, 14]
    assert {t.dtype for t in (*episode.support, *episode.query)} == {torch.float32}
    assert all(t.is_contiguous() for t in tensors(episode))


def test_single_precision_is_the_rounded_double_precision_episode():
    spec = RegressionSpec("arml6")
    single, double = draw(spec), draw(spec, dtype=torch.float64)
    for low, high in zip(tensors(single), tensors(double), strict=True):
        assert torch.equal(low, high.to(low.dtype))


@pytest.mark.parametrize("group", GROUPS)
def test_task_and_query_inputs_stay_when_shots_and_noise_change(group):
    few, many = (
        RegressionSpec(group, n_shot=1, noise=0.0),
        RegressionSpec(group, n_shot=9, noise=1.0),
    )
    assert torch.equal(draw(few).query.x, draw(many).query.x)
    for a, b in zip(
        regression_tasks(few, 0, split="test", start=0, count=5),
        regression_tasks(many, 0, split="test", start=0, count=5),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("group", GROUPS)
def test_coefficients_are_uniform_in_the_published_ranges(group):
    spec = RegressionSpec(group)
    tasks = regression_tasks(spec, 1, split="train", start=0, count=1500)
    for family, name in enumerate(spec.families):
        drawn = tasks.coefficients[tasks.family == family].numpy()
        ranges = published_ranges(group, name)
        for column, (low, high) in zip(drawn.T, ranges, strict=False):
            assert low <= column.min() < column.max() <= high
            uniform = oracle.uniform(low, high - low)
            assert oracle.kstest(column, uniform.cdf).pvalue > 1e-4
        assert (drawn[:, len(ranges) :] == 0).all()


@pytest.mark.parametrize("group", ["hsml4", "arml6"])
def test_families_are_equally_likely(group):
    spec = RegressionSpec(group, n_shot=1, n_query=1)
    counts = draw(spec, seed=2, count=3000).domain.bincount().numpy()
    assert len(counts) == len(spec.families)
    assert oracle.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("group", GROUPS)
def test_inputs_are_uniform_on_minus_five_to_five(group):
    episode = draw(RegressionSpec(group), count=800, dtype=torch.float64)
    for batch in (episode.support, episode.query):
        for x in batch.x[episode.domain >= (4 if group == "arml6" else 0)].unbind(-1):
            assert -5 <= x.min() < -4.98
            assert 4.98 < x.max() <= 5
            assert oracle.kstest(x.flatten().numpy(), oracle.uniform(-5, 10).cdf).pvalue > 1e-4


def test_second_input_is_one_for_the_line_like_families_of_arml6_only():
    spec = RegressionSpec("arml6")
    episode = draw(spec, count=200)
    second = torch.cat([episode.support.x, episode.query.x], dim=1)[..., 1]
    flat = episode.domain < 4
    assert (second[flat] == 1).all()
    assert (second[~flat] != 1).all()
    assert 0 < int(flat.sum()) < 200


@pytest.mark.parametrize(("noise", "expected"), [(None, 0.3), (1.5, 1.5)])
def test_noise_has_the_asked_level_on_support_and_query(noise, expected):
    spec = RegressionSpec("arml6", noise=noise)
    assert spec.noise_std == expected
    noisy = draw(spec, count=500, dtype=torch.float64)
    clean = draw(RegressionSpec("arml6", noise=0.0), count=500, dtype=torch.float64)
    for with_noise, without in ((noisy.support, clean.support), (noisy.query, clean.query)):
        assert torch.equal(with_noise.x, without.x)
        residual = (with_noise.y - without.y).flatten().numpy()
        assert oracle.kstest(residual, oracle.norm(0, expected).cdf).pvalue > 1e-4


@pytest.mark.parametrize("group", ["sinusoid", "hsml4"])
def test_one_dimensional_groups_have_no_noise(group):
    spec = RegressionSpec(group)
    episode = draw(spec, dtype=torch.float64)
    tasks = regression_tasks(spec, 0, split="train", start=0, count=8)
    assert torch.equal(regression_targets(spec, tasks, x=episode.query.x), episode.query.y)


def test_families_are_listed_in_the_order_of_their_ids():
    assert RegressionSpec("sinusoid").families == ("sine",)
    assert RegressionSpec("hsml4").families == ("sine", "line", "quadratic", "cubic")
    assert RegressionSpec("arml6").families == (
        *RegressionSpec("hsml4").families,
        "quadratic_surface",
        "ripple",
    )
    assert set(FAMILIES) == {*GROUPS, *RegressionSpec("hsml4").families}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "hsml4", "n_shot": 0}, "n_shot and n_query"),
        ({"group": "hsml4", "n_query": 0}, "n_shot and n_query"),
        ({"group": "hsml4", "noise": -0.1}, "noise should be"),
        ({"group": "hsml4", "noise": math.nan}, "noise should be"),
    ],
)
def test_impossible_specs_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RegressionSpec(**options)


def test_an_unknown_group_is_refused():
    # Set behind the constructor, where a checked annotation would speak first.
    spec = RegressionSpec("hsml4")
    object.__setattr__(spec, "group", "sinusoids")
    with pytest.raises(ConfigError, match="group should be one of"):
        spec.__post_init__()


def test_impossible_ranges_are_refused():
    spec = RegressionSpec("hsml4")
    with pytest.raises(ConfigError, match="split should be"):
        draw(spec, split="tset")
    with pytest.raises(ConfigError, match="count >= 1"):
        draw(spec, count=0)
    with pytest.raises(ConfigError, match="start >= 0"):
        draw(spec, start=-1)
