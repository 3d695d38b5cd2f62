"""SNAIL against a plain sequence network that reads every query's sequence from the start."""

import pytest
import torch

from tests.learners.metric.problems import close, labels_of, randn
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.tree import expand
from torchemo.core.types import TaskShape
from torchemo.learners.metric.episodic import EpisodicLearner
from torchemo.learners.metric.snail import SNAIL
from torchemo.models import MLP

WAY, FEATURES = 3, 4
HEAD = SNAIL(filters=2, widths=(2, 3, 2), longest=7, features=FEATURES, n_way=WAY)


def drawn(head=HEAD, tasks=2):
    params = head.init(torch.Generator().manual_seed(0))
    return expand({n: t.double() + 0.1 * randn(*t.shape, seed=5) for n, t in params.items()}, tasks)


def logits(head, params, z, y, q, n_way=WAY):
    return head.logits(params, head.fit(params, z, y, n_way=n_way), q)


def plain(head, params, z, y, q):
    """Read one sequence, position by position."""

    def linear(x, layer):
        return params[f"{layer}.weight"] @ x + params[f"{layer}.bias"]

    tokens = [torch.cat([a, torch.eye(WAY).double()[k]]) for a, k in zip(z, y, strict=True)]
    tokens.append(torch.cat([q, torch.zeros(WAY).double()]))
    for block in range(3):
        keys, values, queries = (
            [linear(t, f"attend{block}.{part}") for t in tokens]
            for part in ("key", "value", "query")
        )
        read = []
        for t, query in enumerate(queries):
            scores = torch.stack([query @ k / len(k) ** 0.5 for k in keys[: t + 1]]).softmax(0)
            read.append(sum(w * v for w, v in zip(scores, values[: t + 1], strict=True)))
        tokens = [torch.cat([t, r]) for t, r in zip(tokens, read, strict=True)]
        for i, dilation in enumerate(head.dilations if block < 2 else []):
            grown = []
            for t, now in enumerate(tokens):
                past = tokens[t - dilation] if t >= dilation else torch.zeros_like(now)
                f, g = linear(torch.cat([past, now]), f"convolve{block}.{i}").chunk(2)
                grown.append(torch.cat([now, f.tanh() * g.sigmoid()]))
            tokens = grown
    return linear(tokens[-1], "label")


@pytest.mark.parametrize("shots", [(1, 1, 1), (2, 2, 3)])
@pytest.mark.parametrize("first", [1, 2])
def test_a_support_set_read_once_gives_the_answers_of_whole_sequences(shots, first):
    head = SNAIL(**{**vars(HEAD), "first_dilation": first})
    params, n = drawn(head), sum(shots)
    z, q, y = randn(2, n, FEATURES), randn(2, 3, FEATURES, seed=1), labels_of(2, shots, seed=0)
    found = logits(head, params, z, y, q)
    for b in range(2):
        own = {name: t[b] for name, t in params.items()}
        for i in range(3):
            close(found[b, i], plain(head, own, z[b], y[b], q[b, i]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("first", "reached"), [(1, [True] * 6), (2, [False, True] * 3)])
def test_dilations_from_one_reach_every_example_and_from_two_every_second(first, reached):
    """Attention is switched off, so that only convolutions carry an example to the query."""
    head = SNAIL(**{**vars(HEAD), "first_dilation": first, "longest": 6})
    params = drawn(head)
    for name in params:
        if name.startswith("attend"):
            params[name] = torch.zeros_like(params[name])
    z = randn(2, 6, FEATURES).requires_grad_()
    y, q = labels_of(2, (2, 2, 2), seed=0), randn(2, 1, FEATURES, seed=1)
    (gradient,) = torch.autograd.grad(logits(head, params, z, y, q).sum(), z)
    seen = gradient.abs().amax((0, 2)) > 0
    # Position 0 is the furthest away: six steps before the query.
    assert seen.flip(0).tolist() == reached


def test_paper_sizes():
    """Channels of the paper for five classes, 64 features and up to five shots."""
    head = SNAIL(features=64, n_way=5)
    inputs = {layer: ins for layer, _, ins in head._layers()}
    assert len(head.dilations) == 5
    found = [inputs[f"attend{i}.value"] for i in range(3)] + [inputs["label"]]
    assert found == [69, 741, 1509, 1765]
    one = SNAIL(features=64, n_way=5, longest=5)
    inputs = {layer: ins for layer, _, ins in one._layers()}
    assert [inputs[f"attend{i}.value"] for i in range(3)] == [69, 485, 997]


def test_fewer_classes_use_the_first_labels_and_more_are_refused():
    params, z, q = drawn(), randn(2, 4, FEATURES), randn(2, 3, FEATURES, seed=1)
    y = labels_of(2, (2, 2), seed=0)
    assert torch.equal(
        logits(HEAD, params, z, y, q, n_way=2), logits(HEAD, params, z, y, q)[..., :2]
    )
    learner = EpisodicLearner(MLP(WAY, n_in=2, hidden=(FEATURES,)), HEAD, n_way=WAY)
    with pytest.raises(ConfigError, match="at most 3 classes, got 4"):
        learner.for_classes(4)


def test_a_support_set_that_is_too_long_is_refused():
    with pytest.raises(DataError, match="at most 7 support examples, got 8"):
        HEAD.fit(drawn(), randn(2, 8, FEATURES), torch.zeros(2, 8).long(), n_way=WAY)


def test_it_learns_to_copy_the_label_of_the_example_that_is_the_query():
    """Features are class indicators, so the answer is a label that stands in the sequence."""
    head = SNAIL(filters=8, widths=(8, 8, 8), longest=3, features=WAY, n_way=WAY)
    own = {n: t.requires_grad_() for n, t in head.init(torch.Generator().manual_seed(0)).items()}
    adam = torch.optim.Adam(own.values(), lr=0.02)
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        y, kind = (torch.stack([torch.randperm(WAY, generator=g) for _ in range(32)]) for _ in "yk")
        z, theta = torch.eye(WAY)[kind], expand(own, 32)
        out = logits(head, theta, z, y, z)
        adam.zero_grad()
        torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
        adam.step()
    assert float((out.argmax(-1) == y).float().mean()) > 0.99


def test_the_task_shape_gives_its_sizes():
    learner = SNAIL.build(
        SNAIL.Options(),
        MLP(WAY, n_in=2, hidden=(FEATURES,)),
        TaskShape("classification", (2,), WAY),
    )
    assert (learner.head.features, learner.head.n_way) == (FEATURES, WAY)
