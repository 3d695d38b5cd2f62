"""Oracles: Hessians by automatic differentiation of losses of linear models; pooled support sets."""

import pytest
import torch

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy, mean_squared_error
from torchemo.core.rng import generator_for
from torchemo.core.tree import tree_map
from torchemo.core.types import Batch
from torchemo.learners.curvature import check_loss, factors, roots, steady
from torchemo.learners.gradient.anil import ANIL
from torchemo.learners.gradient.bmg import BMG
from torchemo.learners.gradient.inner import SGD
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.recognise import ByName
from torchemo.models import MLP
from torchemo.training.lifelong import revisit

B, N, DIM, WAY = 2, 4, 3, 3
NAMES = [("a",), ("b",)]


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("loss", [cross_entropy, mean_squared_error])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_factors_make_up_the_hessian_of_a_linear_model(loss, scale):
    x, w = torch.randn(B, N, DIM), torch.randn(B, DIM, WAY)
    y = torch.randint(WAY, (B, N)) if loss is cross_entropy else torch.randn(B, N, WAY)
    leaves = w.clone().requires_grad_()
    found = factors(roots(x @ leaves, y), {"w": leaves}, scale=scale)["w"].flatten(2)
    for b in range(B):

        def of(one, b=b):
            return scale * loss((x[b] @ one.view(DIM, WAY))[None], y[b : b + 1])[0]

        hessian = torch.autograd.functional.hessian(of, w[b].flatten())
        torch.testing.assert_close(found[b].T @ found[b], hessian, rtol=1e-10, atol=1e-12)


def test_other_losses_are_refused():
    with pytest.raises(ConfigError, match="cross-entropy and for the squared error"):
        check_loss(lambda out, y: out.sum((1, 2)))


def curves(n):
    x = torch.rand(B, n, 1) * 4 - 2
    return Batch(x, (x * torch.tensor([[[1.0]], [[2.0]]])).sin())


def pooled(*batches):
    return Batch(torch.cat([b.x for b in batches], 1), torch.cat([b.y for b in batches], 1))


def learner_of(kind):
    # Linear in what adapts: ANIL's head on its trunk, or a network without a hidden layer.
    if kind == "anil":
        model, adapts = MLP(hidden=(8,), initializer="kaiming"), "head"
    else:
        model, adapts = MLP(hidden=(), initializer="kaiming"), "all"
    loop = InnerLoop(model, mean_squared_error, SGD(0.1), steps=5, adapts=adapts)
    made = (ANIL if kind == "anil" else MAML)(loop)
    return made, tree_map(lambda t: t.double(), made.init(generator_for(0)))


@pytest.mark.parametrize("kind", ["anil", "linear"])
def test_where_the_network_is_linear_recalled_visits_are_replayed_exactly(kind):
    learner, params = learner_of(kind)
    memory = LifelongMemory(ByName(), content="gauss_newton")
    visits = [curves(n) for n in (5, 2, 4, 5)]  # also of visits with fewer examples
    for support in visits[:-1]:
        revisit(learner, params, support, memory, names=NAMES).remember()
    found = revisit(learner, params, visits[-1], memory, names=NAMES).fitted
    alone = revisit(learner, params, pooled(*visits), LifelongMemory(ByName()), names=NAMES).fitted
    for now, then in zip(found.path, alone.path, strict=True):
        for name, theta in then.items():
            torch.testing.assert_close(now[name], theta, rtol=1e-10, atol=1e-12)


def spectrum(found, rates):
    """Eigenvalues of R^1/2 F^T F R^1/2, in full."""
    rows = torch.cat([found[n].flatten(2) for n in found], 2)
    rate = torch.cat([rates[n].expand(found[n][:, 0].shape).flatten(1) for n in found], 1)
    scaled = rows * rate.sqrt()[:, None]
    return torch.linalg.eigvalsh(scaled.mT @ scaled)


def test_directions_that_would_overshoot_are_flattened_and_others_kept():
    found = {"w": torch.randn(B, N, DIM, WAY), "b": torch.randn(B, N, WAY)}
    rates = {"w": 0.1 * torch.rand(B, DIM, WAY), "b": torch.tensor([[0.05], [0.2]])}
    before, after = spectrum(found, rates), spectrum(steady(found, rates), rates)
    assert bool((before > 1.01).any())
    assert bool(((before > 0.01) & (before < 0.99)).any())
    torch.testing.assert_close(after, before.clamp(max=1), rtol=1e-9, atol=1e-12)
    gentle = {n: rate / 1000 for n, rate in rates.items()}
    for name, kept in steady(found, gentle).items():
        rows, turned = found[name].flatten(2), kept.flatten(2)
        torch.testing.assert_close(turned.mT @ turned, rows.mT @ rows)


def test_recalled_visits_do_not_diverge_where_the_rate_is_too_high_for_them():
    """Past points far out are steep: at this rate the quadratic model alone would run away."""
    learner, params = learner_of("linear")
    memory = LifelongMemory(ByName(), content="gauss_newton")
    steep = curves(5)
    steep = Batch(8 * steep.x, steep.y)
    revisit(learner, params, steep, memory, names=NAMES).remember()
    found = revisit(learner, params, curves(5), memory, names=NAMES, steps=50)
    assert all(theta.abs().max() < 1e3 for theta in found.fitted.path[-1].values())


def test_slopes_alone_are_not():
    learner, params = learner_of("linear")
    memory = LifelongMemory(ByName())
    visits = [curves(5) for _ in range(3)]
    for support in visits[:-1]:
        revisit(learner, params, support, memory, names=NAMES).remember()
    found = revisit(learner, params, visits[-1], memory, names=NAMES).fitted
    alone = revisit(learner, params, pooled(*visits), LifelongMemory(ByName()), names=NAMES).fitted
    gaps = [(found.path[-1][n] - t).abs().max() for n, t in alone.path[-1].items()]
    assert max(gaps) > 1e-3


def test_a_learner_without_known_curvature_says_so():
    learner, params = learner_of("linear")
    memory = LifelongMemory(ByName(), content="gauss_newton")
    with pytest.raises(ConfigError, match="BMG does not give"):
        revisit(BMG(learner), params, curves(3), memory, names=NAMES)
