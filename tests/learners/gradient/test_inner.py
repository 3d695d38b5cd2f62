"""The inner loop against torch.optim and against closed forms on quadratics."""

import pytest
import torch
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Start
from torchemo.learners.gradient.inner import RULES, SGD, Adam, Momentum, adapt, rate_at

SHAPES = {"a": (3, 2), "b": (4,)}


def quadratic_forward(params, x, step):
    """A 'network' whose output is its parameter, so that the loss can be any function of it."""
    return params["theta"][:, None].expand(-1, x.shape[1])


def half_square(out: Tensor, y: Tensor) -> Tensor:
    """f(theta; c) = (theta - c)^2 / 2 with out = theta and y = c."""
    return 0.5 * (out - y).square().mean(1)


def run(theta, c, *, rule, steps, order=2, direction=None, rates=None):
    start = Start({"theta": torch.tensor([theta], dtype=torch.float64, requires_grad=True)}, rates)
    batch = Batch(torch.zeros(1, 1), torch.tensor([[c]], dtype=torch.float64))
    done = adapt(
        quadratic_forward, start, batch, loss=half_square, rule=rule, steps=steps,
        names=["theta"], order=order, direction=direction,
    )  # fmt: skip
    return start.theta["theta"], done


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Momentum(0.1, mu=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (Momentum(0.05, mu=0.5), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5)),
        (
            Momentum(0.1, mu=0.8, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
        ),
        (Adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
        (
            Adam(0.3, betas=(0.5, 0.9), eps=1e-3),
            lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.5, 0.9), eps=1e-3),
        ),
        (Adam(0.1, betas=(0.0, 0.999)), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.999))),
    ],
    ids=[str(i) for i in range(7)],
)
def test_rules_move_parameters_as_torch_optim_does(ours, theirs):
    g = torch.Generator().manual_seed(0)
    first = {n: torch.randn(1, *s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()}
    grads = [
        {n: torch.randn(1, *s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()}
        for _ in range(7)
    ]
    grads[3]["b"][:] = 0.0
    modules = {n: torch.nn.Parameter(p.clone()) for n, p in first.items()}
    optimizer = theirs(list(modules.values()))
    params, state = first, ours.init(first)
    for gradient in grads:
        for name, p in modules.items():
            p.grad = gradient[name]
        optimizer.step()
        update, state = ours.update(gradient, state)
        params = {n: params[n] - ours.lr * update[n] for n in params}
        for name in params:  # distances from the start, so that the tolerance means something
            moved, expected = params[name] - first[name], modules[name].data - first[name]
            torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", [cls() for cls in RULES.values()], ids=repr)
def test_a_zero_gradient_moves_nothing_and_has_a_finite_derivative(rule):
    d = {"a": torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)}
    update, _ = rule.update(d, rule.init({"a": torch.zeros(1, 3, dtype=torch.float64)}))
    assert torch.equal(update["a"], torch.zeros(1, 3, dtype=torch.float64))
    (slope,) = torch.autograd.grad(update["a"].sum(), d["a"])
    assert slope.isfinite().all()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_sgd_on_a_quadratic_is_geometric_and_so_is_its_meta_gradient(steps):
    theta, c_s, c_q, alpha = 1.3, -0.4, 0.7, 0.3
    expected = c_s + (1 - alpha) ** steps * (theta - c_s)
    for order, factor in ((2, (1 - alpha) ** steps), (1, 1.0)):
        leaf, done = run(theta, c_s, rule=SGD(alpha), steps=steps, order=order)
        end = done.state["theta"]
        assert end.item() == pytest.approx(expected, rel=1e-14)
        (meta,) = torch.autograd.grad(0.5 * (end - c_q).square().sum(), leaf)
        assert meta.item() == pytest.approx(factor * (expected - c_q), rel=1e-13)


def test_two_momentum_steps_have_their_closed_form():
    theta, c, alpha, mu = 1.3, -0.4, 0.2, 0.9
    _, done = run(theta, c, rule=Momentum(alpha, mu=mu), steps=2)
    first = theta - alpha * (theta - c)
    second = theta - alpha * ((1 + mu) * (theta - c) + (first - c))
    assert done.state["theta"].item() == pytest.approx(second, rel=1e-14)


def test_meta_sgd_gradient_in_the_rate_is_minus_own_times_query_gradient():
    theta, c_s, c_q = 1.3, -0.4, 0.7
    rate = torch.tensor([[0.25]], dtype=torch.float64, requires_grad=True)
    _, done = run(theta, c_s, rule=SGD(99.0), steps=1, rates={"theta": rate})
    end = done.state["theta"]
    (slope,) = torch.autograd.grad(0.5 * (end - c_q).square().sum(), rate)
    assert slope.item() == pytest.approx(-(theta - c_s) * (end.item() - c_q), rel=1e-14)


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_emo_mean_and_sum_with_constant_recall_have_their_closed_forms(steps):
    theta, c, alpha, m, total = 1.3, -0.4, 0.3, 4, 0.9
    rules = {
        "mean": (
            alpha / (m + 1),
            total,
            lambda g, s, theta: {n: (v + total) / (m + 1) for n, v in g.items()},
        ),
        "sum": (alpha, total / m, lambda g, s, theta: {n: v + total / m for n, v in g.items()}),
    }
    for a, b, direction in rules.values():
        _, done = run(theta, c, rule=SGD(alpha), steps=steps, direction=direction)
        expected = c - b + (1 - a) ** steps * (theta - c + b)
        assert done.state["theta"].item() == pytest.approx(expected, rel=1e-13)


def test_one_step_of_second_order_adam_equals_first_order():
    """The first Adam step is alpha * sign(d), whose derivative is nearly zero."""
    meta = []
    for order in (1, 2):
        leaf, done = run(1.3, -0.4, rule=Adam(0.1), steps=1, order=order)
        (gradient,) = torch.autograd.grad((done.state["theta"] - 0.7).square().sum(), leaf)
        meta.append(gradient.item())
    assert meta[0] == pytest.approx(meta[1], rel=1e-6)


def test_order_zero_keeps_no_graph_and_gives_the_same_numbers():
    _, with_graph = run(1.3, -0.4, rule=Adam(0.1), steps=3, order=2)
    _, without = run(1.3, -0.4, rule=Adam(0.1), steps=3, order=0)
    assert without.state["theta"].grad_fn is None
    assert torch.equal(with_graph.state["theta"].detach(), without.state["theta"])
    assert len(without.path) == 4
    assert without.support_losses.shape == (1, 3)


def test_inner_gradients_are_partial_when_one_tensor_is_made_from_another():
    body = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    start = Start({"body": body, "head": 3 * body})
    done = adapt(
        lambda p, x, s: (p["body"] * p["head"])[:, None],
        start, Batch(torch.zeros(1, 1), torch.zeros(1, 1)),
        loss=lambda out, y: out.mean(1), rule=SGD(0.1), steps=1, names=["body", "head"],
    )  # fmt: skip
    assert done.gradients[0]["body"].item() == 6.0  # d(body * head)/d body = head, not 12
    assert done.gradients[0]["head"].item() == 2.0


def test_rates_of_later_steps_reuse_the_last_column():
    rates = {"w": torch.tensor([[1.0, 2.0]])}
    assert [rate_at(rates, s)["w"].item() for s in (0, 1, 5)] == [1.0, 2.0, 2.0]
    assert rate_at(None, 3) is None


def test_unknown_tensors_negative_steps_and_orders_are_refused_by_name():
    start = Start({"w": torch.ones(1, 1)})
    batch = Batch(torch.zeros(1, 1), torch.zeros(1, 1))
    base = {"loss": half_square, "rule": SGD(), "steps": 1, "names": ["w"]}
    for wrong, word in (
        ({"names": ["fc.weight"]}, "fc.weight"),
        ({"steps": -1}, "-1"),
        ({"order": 3}, "3"),
    ):
        with pytest.raises(ConfigError, match=word):
            adapt(quadratic_forward, start, batch, **{**base, **wrong})
