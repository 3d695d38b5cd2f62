"""Small tasks in float64 for metric learners, with another number of examples in every class."""

import torch

from torchemo.config.registry import Part
from torchemo.core.tree import expand, leaves
from torchemo.core.types import BaseClasses, Batch, Episode, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.learner import buffers_of, learned, network_names, outer_rows, start_of
from torchemo.models import MLP

N_WAY, N_IN, N_BASE = 3, 2, 7
MODEL = MLP(N_WAY, n_in=N_IN, hidden=(5,), initializer="kaiming", activation="tanh")
CASES = {
    "protonet": Part("protonet"),
    "matchingnet": Part("matchingnet"),
    "matchingnet/learned": Part("matchingnet", {"scale": 4.0, "learn_scale": True}),
    "nearest-mean": Part("nearest-mean"),
    "nearest-mean/euclidean": Part("nearest-mean", {"distance": "euclidean"}),
    "metaoptnet-ridge": Part("metaoptnet-ridge", {"regularization": 2.0, "scale": 3.0}),
    "metaoptnet-svm": Part("metaoptnet-svm", {"penalty": 0.5, "scale": 3.0}),
    "can": Part("can"),
    "ctm": Part("ctm", {"filters": 4}),
    "dynamic-fs": Part("dynamic-fs", {"base_queries": 4}),
    "tadam": Part("tadam"),
    "tadam/cosine": Part("tadam", {"distance": "cosine", "scale": 3.0}),
    "relationnet": Part("relationnet", {"filters": 3, "units": 4}),
    "relationnet/cross-entropy": Part(
        "relationnet", {"filters": 3, "units": 4, "pool": "mean", "loss": "cross_entropy"}
    ),
    "tapnet": Part("tapnet"),
    "tapnet/more": Part("tapnet", {"references": 4, "assign": "hungarian"}),
    "snail": Part("snail", {"filters": 2, "widths": (2, 3, 2), "longest": 12}),
    "hvm": Part("hvm", {"levels": 1, "width": 3, "neighbours": 2}),
    "hvm/batch": Part("hvm", {"levels": 1, "width": 3, "bn_over": "batch", "momentum": 0.0}),
    "variational-fsl": Part("variational-fsl", {"hidden": 3}),
}
METRIC = tuple(sorted({part.name for part in CASES.values()}))
"""Learners without an inner loop."""
SHOTS = (2, 1, 3)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_learner(case, model=MODEL, n_way=N_WAY, x=(N_IN,)):
    kind, options = LEARNERS.resolve(CASES[case])
    return kind.build(options, model, TaskShape("classification", x, n_way, base_classes=N_BASE))


def make_params(learner, seed=0):
    params = learner.init(torch.Generator().manual_seed(seed))
    params = {name: p.double() for name, p in params.items()}
    jitter = torch.Generator().manual_seed(seed + 1)
    # Zero biases would hide mistakes.
    for name in learned(learner, params):
        noise = torch.randn(params[name].shape, generator=jitter, dtype=torch.float64)
        params[name] = params[name] + 0.1 * noise
    return params


def labels_of(tasks, shots, seed):
    """Labels with ``shots[c]`` examples of class c, in another order in every task."""
    y = torch.cat([torch.full((n,), c) for c, n in enumerate(shots)])
    g = torch.Generator().manual_seed(seed)
    return torch.stack([y[torch.randperm(len(y), generator=g)] for _ in range(tasks)])


def make_episode(tasks=2, shots=SHOTS, queries=2, x=(N_IN,), spread=1.0, seed=0):
    """Gaussian classes: ``spread`` is the distance of their centres from each other, about."""
    centres = spread * randn(tasks, len(shots), *x, seed=seed)

    def drawn(y, seed):
        return Batch(centres[torch.arange(tasks)[:, None], y] + randn(*y.shape, *x, seed=seed), y)

    support = drawn(labels_of(tasks, shots, seed), seed + 1)
    query = drawn(labels_of(tasks, (queries,) * len(shots), seed + 1), seed + 2)
    return Episode(support, query)


def make_base(learner, tasks=2, x=(N_IN,), seed=5):
    """What training knows of the classes, with as many further examples as the learner asks for."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.stack(
        [torch.randperm(N_BASE, generator=g)[: learner.n_way] for _ in range(tasks)]
    )
    n = learner.base_examples
    y = torch.randint(N_BASE, (tasks, n), generator=g)
    return BaseClasses(labels, Batch(randn(tasks, n, *x, seed=seed), y) if n else None)


def begin(learner, params, support):
    """Where the tasks begin, as leaves of the graph."""
    theta = {name: params[name] for name in network_names(params)}
    start = start_of(learner, params, support, base=expand(theta, len(support.x)))
    return start._replace(theta=leaves(start.theta))


def answers(learner, params, episode, *, graph=True):
    fitted = learner.fit(begin(learner, params, episode.support), episode.support, graph=graph)
    return learner.predict(fitted, episode.query.x).detach()


def rows(learner, start, episode):
    """Per-task losses, and their gradients by name."""
    names = [name for name in start.theta if name not in buffers_of(learner)]
    fitted = learner.fit(start, episode.support)
    wanted = [start.theta[name] for name in names]
    losses, found = outer_rows(learner, start, fitted, episode.query, leaves=wanted)
    return losses, dict(zip(names, found, strict=True))


def some(episode, tasks):
    return Episode(*(Batch(b.x[tasks], b.y[tasks]) for b in (episode.support, episode.query)))


def close(found, expected, rtol=1e-11, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
