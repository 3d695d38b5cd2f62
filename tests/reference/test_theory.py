"""Numeric checks of the convergence section: oracles are direct simulation and closed forms."""

import doctest
import math

import numpy as np
import pytest

from tests.reference import theory
from tests.reference.theory import (
    block_companion,
    companion,
    curvature_grid,
    impulse_response,
    lyapunov_bound,
    paper_bound,
    recall_fixed_point,
    report,
    sgd_bound,
    spectral_norm,
    spectral_radius,
    stationary_variance,
)
from torchemo.core.errors import ConfigError, ShapeError


def equal_weights(S):
    return [1.0 / S] * S


def simulate(weights, alpha, *, curvature, sigma, runs, steps, rng, start=0.0):
    """Run Delta_{t+1} = Delta_t - alpha sum_s w_s (tau Delta_{t-s} + eps_{t-s}); return all."""
    S = len(weights)
    deltas = np.full((steps + S, runs), start)
    noise = np.zeros((steps + S, runs))
    for t in range(S - 1, steps + S - 1):
        noise[t] = sigma * rng.standard_normal(runs)
        drift = sum(w * (curvature * deltas[t - s] + noise[t - s]) for s, w in enumerate(weights))
        deltas[t + 1] = deltas[t] - alpha * drift
    return deltas[S - 1 :]


@pytest.mark.parametrize("trial", range(20))
def test_companion_matrices_reproduce_the_recursion_with_changing_weights_and_curvatures(trial):
    rng = np.random.default_rng(trial)
    S, dim, steps = int(rng.integers(1, 8)), int(rng.integers(1, 4)), 30
    alpha = rng.uniform(0.01, 0.5)
    factors = rng.standard_normal((steps + S, dim, dim))
    hessians = factors @ factors.transpose(0, 2, 1)
    hessians /= np.linalg.norm(hessians, ord=2, axis=(1, 2))[:, None, None]
    deltas = list(rng.standard_normal((S, dim)))
    state = np.concatenate(deltas[::-1])
    for t in range(S - 1, S - 1 + steps):
        w = rng.uniform(size=S)
        ages = list(range(t, t - S, -1))
        step = sum(w[s] * hessians[age] @ deltas[age] for s, age in enumerate(ages))
        deltas.append(deltas[t] - alpha * step)
        state = block_companion(w, alpha, curvatures=hessians[ages]) @ state
        np.testing.assert_allclose(state[:dim], deltas[-1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, np.concatenate(deltas[: -S - 1 : -1]), rtol=0, atol=1e-12)


def test_scalar_companion_is_the_block_form_with_one_dimension():
    taus = np.array([0.5, 1.0, 2.0])
    scalar = companion([0.2, 0.3, 0.5], 0.1, curvature=taus)
    expected = [[1 - 0.1 * 0.2 * 0.5, -0.1 * 0.3, -0.1 * 0.5 * 2], [1, 0, 0], [0, 1, 0]]
    np.testing.assert_allclose(scalar, expected, rtol=1e-15)


def test_norm_and_radius_agree_with_their_definitions():
    matrix = np.random.default_rng(0).standard_normal((5, 5))
    gram = np.linalg.eigvalsh(matrix.T @ matrix)
    assert spectral_norm(matrix) == pytest.approx(math.sqrt(gram[-1]), rel=1e-12)
    growth = np.linalg.norm(np.linalg.matrix_power(matrix, 300)) ** (1 / 300)
    assert spectral_radius(matrix) == pytest.approx(growth, rel=0.01)
    rotation = np.array([[0.0, -0.5], [0.5, 0.0]])
    assert spectral_radius(np.stack([rotation, 2 * rotation])) == pytest.approx([0.5, 1.0])


def test_spectral_norm_is_never_below_one_when_old_gradients_are_kept():
    rng = np.random.default_rng(0)
    smallest = math.inf
    for _ in range(1000):
        S, alpha, tau = int(rng.integers(2, 8)), rng.uniform(0.001, 2), rng.uniform(0.01, 2)
        w = rng.uniform(size=S)
        norm = float(spectral_norm(companion(w, alpha, curvature=tau)))
        assert norm >= math.sqrt(1 + (1 - alpha * w[0] * tau) ** 2) * (1 - 1e-12)
        smallest = min(smallest, norm)
    assert smallest >= 1


@pytest.mark.parametrize(
    ("S", "alpha", "norm", "radius"),
    [
        (1, 0.1, 0.900, 0.900),
        (2, 0.01, 1.411, 0.990),
        (2, 0.1, 1.380, 0.894),
        (5, 0.1, 1.401, 0.863),
        (5, 1.0, 1.333, 1.007),
        (11, 0.5, 1.390, 1.008),
        (21, 0.1, 1.411, 0.969),
        (21, 0.5, 1.401, 1.026),
    ],
)
def test_published_table_of_norms_and_radii(S, alpha, norm, radius):
    matrix = companion(equal_weights(S), alpha, curvature=1.0)
    assert spectral_norm(matrix) == pytest.approx(norm, abs=6e-4)
    assert spectral_radius(matrix) == pytest.approx(radius, abs=6e-4)


def sgd_errors(spectrum, *, alpha, runs, steps, rng):
    """Simulate stochastic descent with E||eps||^2 = 1; return ||Delta||^2, [steps + 1, runs]."""
    delta = np.ones((runs, len(spectrum)))
    errors = [np.square(delta).sum(1)]
    for _ in range(steps):
        eps = rng.standard_normal(delta.shape) / math.sqrt(len(spectrum))
        delta = delta - alpha * (delta * spectrum + eps)
        errors.append(np.square(delta).sum(1))
    return np.array(errors)


def mean_and_error(errors):
    return errors.mean(-1), errors.std(-1, ddof=1) / math.sqrt(errors.shape[-1])


@pytest.mark.parametrize("spectrum", [[1.0], [1.0, 1.0], [0.2, 1.0], [0.5, 1.0, 3.0]])
@pytest.mark.parametrize("alpha", [0.1, 0.6])
def test_bound_of_plain_sgd_holds_at_every_step(spectrum, alpha):
    rng = np.random.default_rng(1)
    errors = sgd_errors(np.array(spectrum), alpha=alpha, runs=2000, steps=60, rng=rng)
    mean, error = mean_and_error(errors)
    start = math.sqrt(len(spectrum))
    settings = {"mu": min(spectrum), "L": max(spectrum), "alpha": alpha, "sigma": 1.0}
    bounds = np.array([sgd_bound(t, start, **settings) for t in range(61)])
    assert (mean <= bounds + 3 * error).all()


def test_bound_of_plain_sgd_is_attained_in_the_limit_when_mu_equals_L():
    rng = np.random.default_rng(2)
    errors = sgd_errors(np.ones(3), alpha=0.1, runs=2000, steps=200, rng=rng)
    mean, error = mean_and_error(errors)
    floor = sgd_bound(200, math.sqrt(3), mu=1.0, L=1.0, alpha=0.1, sigma=1.0)
    assert floor == pytest.approx(0.01 / (1 - 0.81), rel=1e-12)
    assert abs(mean[-1] - floor) < 3 * error[-1]


def test_bound_of_the_paper_is_half_L_times_the_sgd_bound_for_one_gradient_and_empty_for_more():
    settings = {"mu": 0.5, "L": 2.0, "alpha": 0.1, "sigma": 1.0}
    assert paper_bound(3, 2.0, weights=[1.0], **settings) == pytest.approx(
        sgd_bound(3, 2.0, **settings)
    )
    assert sgd_bound(3, 2.0, **settings) == pytest.approx(0.95**6 * 4 + 0.01 / (1 - 0.95**2))
    for S in range(2, 8):
        assert paper_bound(3, 2.0, weights=equal_weights(S), **settings) == math.inf
    assert paper_bound(3, 2.0, weights=[1.0, 0.0], **settings) == math.inf
    assert sgd_bound(3, 2.0, mu=0.5, L=2.0, alpha=1.5, sigma=1.0) == math.inf


@pytest.mark.parametrize(("S", "alpha"), [(1, 0.3), (2, 0.1), (5, 0.1), (5, 0.5), (21, 0.1)])
def test_displacement_shrinks_at_the_spectral_radius(S, alpha):
    matrix = companion(equal_weights(S), alpha, curvature=1.0)
    state, log_norm, steps = np.ones(S), 0.0, 4000
    for _ in range(steps):
        state = matrix @ state
        norm = np.linalg.norm(state)
        state, log_norm = state / norm, log_norm + math.log(norm)
    assert log_norm / steps == pytest.approx(math.log(spectral_radius(matrix)), abs=2e-3)


@pytest.mark.parametrize(
    ("S", "alpha", "tau"), [(1, 0.1, 1.0), (2, 0.3, 1.0), (5, 0.1, 0.5), (10, 0.1, 1.0)]
)
def test_lyapunov_bound_is_never_violated(S, alpha, tau):
    weights, sigma = equal_weights(S), 0.01
    bound = lyapunov_bound(weights, alpha, curvature=tau, sigma=sigma)
    rng = np.random.default_rng(3)
    deltas = simulate(
        weights, alpha, curvature=tau, sigma=sigma, runs=500, steps=300, rng=rng, start=1.0
    )
    mean, _ = mean_and_error(np.square(deltas))
    bounds = [bound.displacement(t, np.ones(S)) for t in range(301)]
    assert (mean <= bounds).all()
    assert bounds[-1] < bounds[0]
    assert bound.floor >= stationary_variance(weights, alpha, curvature=tau, sigma=sigma)


def test_lyapunov_form_contracts_in_its_own_norm_and_is_loose_by_the_known_amount():
    bound = lyapunov_bound([1.0], 0.1, curvature=1.0, sigma=1.0)
    assert bound.floor == pytest.approx(1.0, rel=1e-12)
    bound = lyapunov_bound(equal_weights(5), 0.1, curvature=1.0, sigma=1.0)
    matrix = companion(equal_weights(5), 0.1, curvature=1.0)
    np.testing.assert_allclose(matrix.T @ bound.form @ matrix, bound.form - np.eye(5), atol=1e-10)
    root = np.linalg.cholesky(bound.form).T
    contraction = np.linalg.norm(root @ matrix @ np.linalg.inv(root), ord=2)
    assert contraction == pytest.approx(bound.rate, rel=1e-10)
    assert np.linalg.inv(bound.form)[0, 0] <= 1 / np.linalg.eigvalsh(bound.form)[0]


@pytest.mark.parametrize(("S", "exact"), [(1, 0.0526), (2, 0.0526), (5, 0.0550), (10, 0.0606)])
def test_stationary_variance_equals_the_published_values_and_monte_carlo(S, exact):
    weights = equal_weights(S)
    variance = stationary_variance(weights, 0.1, curvature=1.0, sigma=1.0)
    assert variance == pytest.approx(exact, abs=5.1e-5)
    rng = np.random.default_rng(4)
    deltas = simulate(weights, 0.1, curvature=1.0, sigma=1.0, runs=20_000, steps=150, rng=rng)
    mean, error = mean_and_error(np.square(deltas[-1]))
    assert abs(mean - variance) < 3 * error


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.0, 0.5], [0.1, 0.2, 0.3, 0.4], [0.05] * 20])
def test_stationary_variance_is_the_energy_of_a_simulated_unit_impulse(weights):
    S, steps = len(weights), 20_000
    deltas, eps = [0.0] * (steps + S + 1), {S: 1.0}
    for t in range(S, steps + S):
        drift = sum(w * (0.7 * deltas[t - s] + eps.get(t - s, 0.0)) for s, w in enumerate(weights))
        deltas[t + 1] = deltas[t] - 0.2 * drift
    energy = sum(d * d for d in deltas)
    variance = stationary_variance(weights, 0.2, curvature=0.7, sigma=3.0)
    assert variance == pytest.approx(9 * energy, rel=1e-9)
    response = impulse_response(weights, 0.2, curvature=0.7, steps=50)
    np.testing.assert_allclose(response, deltas[S + 1 : S + 51], atol=1e-14)


def test_floor_that_ignores_correlated_noise_is_too_small():
    for S, naive in [(1, 0.0526), (2, 0.0249), (5, 0.0078), (10, 0.0045)]:
        radius = float(spectral_radius(companion(equal_weights(S), 0.1, curvature=1.0)))
        floor = 0.01 / S / (1 - radius**2)
        assert floor == pytest.approx(naive, abs=5.1e-5)
        exact = stationary_variance(equal_weights(S), 0.1, curvature=1.0, sigma=1.0)
        assert exact == pytest.approx(floor) if S == 1 else exact > 2 * floor


def test_five_equal_weights_diverge_where_plain_descent_solves_in_one_step():
    deltas = simulate(
        equal_weights(5),
        1.0,
        curvature=1.0,
        sigma=0.0,
        runs=1,
        steps=20_000,
        rng=np.random.default_rng(0),
        start=1.0,
    )[:, 0]
    peaks = np.abs(deltas).reshape(-1)[1:].reshape(40, 500).max(1)
    growth = (peaks[-1] / peaks[0]) ** (1 / (39 * 500))
    assert growth == pytest.approx(1.00735, abs=1e-5)
    assert not report(1.0, 1.0, alpha=1.0, weights=equal_weights(5)).our_condition
    assert report(1.0, 1.0, alpha=1.0, weights=[1.0]).spectral_radius == 0
    with pytest.raises(ConfigError, match="does not settle"):
        stationary_variance(equal_weights(5), 1.0, curvature=1.0, sigma=1.0)
    with pytest.raises(ConfigError, match="does not settle"):
        lyapunov_bound(equal_weights(5), 1.0, curvature=1.0, sigma=1.0)


@pytest.mark.parametrize("recall_every_step", [True, False])
def test_recalling_at_every_step_displaces_the_fixed_point_and_at_the_first_step_does_not(
    recall_every_step,
):
    rng = np.random.default_rng(5)
    dim, m, alpha = 4, 6, 0.5
    factor = rng.standard_normal((dim, dim))
    hessian = factor @ factor.T / dim + np.eye(dim)
    centre, start, neighbours = (
        rng.standard_normal(dim),
        rng.standard_normal(dim),
        rng.standard_normal((m, dim)),
    )
    values = (start - neighbours) @ hessian
    theta = start.copy()
    for step in range(2000):
        recalled = values if recall_every_step or step == 0 else 0 * values
        theta = theta - alpha * (hessian @ (theta - centre) + recalled.sum(0)) / (m + 1)
    expected = centre - (start - neighbours).sum(0) if recall_every_step else centre
    np.testing.assert_allclose(theta, expected, rtol=0, atol=1e-8)
    predicted = recall_fixed_point(
        centre, hessian, values=values if recall_every_step else 0 * values
    )
    np.testing.assert_allclose(predicted, theta, rtol=0, atol=1e-8)


def test_report_compares_both_conditions_over_the_whole_spectrum():
    verdict = report(0.1, 4.0, alpha=0.1, weights=equal_weights(5))
    radii = [
        max(abs(np.roots([1, -1 + 0.02 * tau, *[0.02 * tau] * 4])))
        for tau in curvature_grid(0.1, 4.0)
    ]
    assert verdict.spectral_radius == pytest.approx(max(radii), rel=1e-9)
    assert verdict.worst_curvature == 0.1
    assert not verdict.paper_condition
    assert verdict.our_condition
    assert verdict.own_rate == pytest.approx(0.02)
    text = str(verdict)
    assert "paper's condition (norm < 1) fails" in text
    assert "our condition (radius < 1) holds" in text


def test_report_finds_a_large_curvature_that_breaks_stability():
    verdict = report(0.1, 10.0, alpha=0.1, weights=equal_weights(5))
    assert not verdict.our_condition
    assert verdict.worst_curvature == 10.0


def test_both_conditions_agree_for_plain_descent():
    for alpha, holds in [(0.1, True), (0.99, True), (1.0, False), (1.5, False)]:
        verdict = report(0.5, 2.0, alpha=alpha, weights=[1.0])
        assert verdict.paper_condition is holds
        assert verdict.our_condition is holds
        assert verdict.spectral_norm == pytest.approx(max(abs(1 - 0.5 * alpha), abs(1 - 2 * alpha)))


def test_no_weight_means_no_progress_and_padding_with_zeros_changes_the_papers_answer_only():
    assert not report(1.0, 1.0, alpha=0.1, weights=[0.0, 0.0]).our_condition
    padded, plain = (report(0.5, 1.0, alpha=0.1, weights=w) for w in ([1.0, 0.0], [1.0]))
    assert padded.spectral_radius == pytest.approx(plain.spectral_radius)
    assert (plain.paper_condition, padded.paper_condition) == (True, False)
    assert plain.our_condition
    assert padded.our_condition


def test_grid_contains_both_ends():
    grid = curvature_grid(0.3, 7.0)
    assert (grid[0], grid[-1], len(grid)) == (0.3, 7.0, 257)


@pytest.mark.parametrize("weights", [[], [0.5, -0.1], [1.1], [math.nan]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ConfigError, match="weights should be"):
        report(0.5, 1.0, alpha=0.1, weights=weights)


@pytest.mark.parametrize("alpha", [0.0, -0.1, math.nan, math.inf])
def test_bad_step_sizes_are_refused(alpha):
    with pytest.raises(ConfigError, match="step size alpha"):
        report(0.5, 1.0, alpha=alpha, weights=[1.0])


def test_bad_curvatures_are_refused():
    with pytest.raises(ConfigError, match="0 < mu <= L"):
        report(2.0, 1.0, alpha=0.1, weights=[1.0])
    with pytest.raises(ConfigError, match="0 < mu <= L"):
        report(0.0, 1.0, alpha=0.1, weights=[1.0])
    with pytest.raises(ShapeError, match="one curvature per weight"):
        block_companion([0.5, 0.5], 0.1, curvatures=np.ones((3, 1, 1)))
    with pytest.raises(ConfigError, match="symmetric"):
        block_companion([1.0], 0.1, curvatures=np.array([[[1.0, 1.0], [0.0, 1.0]]]))


def test_the_examples_hold():
    found = doctest.testmod(theory)
    assert found.attempted
    assert not found.failed
