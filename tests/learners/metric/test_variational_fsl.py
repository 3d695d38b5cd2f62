"""Gaussian prototypes against ProtoNet, scipy's densities and sampled divergences."""

import pytest
import torch
from scipy.stats import multivariate_normal

from tests.learners.metric.problems import close, labels_of, randn
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand
from torchemo.learners.metric.protonet import ProtoNet
from torchemo.learners.metric.variational_fsl import VariationalFSL, gaussian_kl

WAY, FEATURES = 3, 4
HEAD = VariationalFSL(hidden=3, features=FEATURES)


def drawn(head=HEAD, trained=True):
    params = head.init(torch.Generator().manual_seed(0))
    noise = 0.3 if trained else 0.0
    return expand(
        {n: t.double() + noise * randn(*t.shape, 1, seed=5)[..., 0] for n, t in params.items()}, 2
    )


def problem():
    return randn(2, 6, FEATURES), labels_of(2, (2, 1, 3), seed=0), randn(2, 5, FEATURES, seed=1)


def test_before_training_it_is_protonet():
    z, y, q = problem()
    params, other = drawn(trained=False), ProtoNet()
    found = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q).softmax(-1)
    close(found, other.logits({}, other.fit({}, z, y, n_way=WAY), q).softmax(-1))


def test_logits_are_log_densities():
    z, y, q = problem()
    params = drawn()
    classifier = HEAD.fit(params, z, y, n_way=WAY)
    found = HEAD.logits(params, classifier, q).log_softmax(-1)
    for b in range(2):
        densities = torch.stack(
            [
                torch.from_numpy(
                    multivariate_normal(
                        classifier["mean"][b, k].numpy(),
                        classifier["log_variance"][b, k].exp().diag().numpy(),
                    ).logpdf(q[b].numpy())
                )
                for k in range(WAY)
            ],
            dim=1,
        )
        close(found[b], (params["scale"][b] * densities).log_softmax(-1), rtol=1e-9, atol=1e-10)


def test_the_divergence_is_that_of_samples_and_zero_for_equal_gaussians():
    p = {"mean": randn(1, 1, 2), "log_variance": 0.3 * randn(1, 1, 2, seed=1)}
    q = {"mean": randn(1, 1, 2, seed=2), "log_variance": 0.3 * randn(1, 1, 2, seed=3)}
    assert torch.equal(gaussian_kl(p, p), torch.zeros(1, 1).double())

    def density(of, x):
        return multivariate_normal(
            of["mean"][0, 0].numpy(), of["log_variance"][0, 0].exp().diag().numpy()
        ).logpdf(x)

    noise = randn(200_000, 2, seed=4)
    x = (p["mean"][0] + noise * (0.5 * p["log_variance"][0]).exp()).numpy()
    sampled = (density(p, x) - density(q, x)).mean()
    assert float(gaussian_kl(p, q)) == pytest.approx(sampled, rel=0.01)


def test_the_divergence_is_of_what_the_support_says_from_what_all_examples_say():
    z, y, q = problem()
    target = torch.tensor([[0, 2, 1, 1, 0], [2, 2, 0, 1, 1]])
    params = drawn()
    plain = VariationalFSL(hidden=3, features=FEATURES, kl_weight=0.0)
    few = HEAD.fit(params, z, y, n_way=WAY)
    both = HEAD.fit(params, torch.cat([z, q], 1), torch.cat([y, target], 1), n_way=WAY)
    found = HEAD.losses(params, few, q, target) - plain.losses(params, few, q, target)
    close(found, HEAD.kl_weight * gaussian_kl(few, both).sum(1), rtol=1e-9, atol=1e-12)


def test_repeated_examples_change_nothing():
    z, y, q = problem()
    params = drawn()
    once = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q)
    twice = HEAD.fit(params, z.repeat(1, 2, 1), y.repeat(1, 2), n_way=WAY)
    close(HEAD.logits(params, twice, q), once)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ConfigError, match=r"learner\.kl_weight should be finite"):
        VariationalFSL(kl_weight=weight)
