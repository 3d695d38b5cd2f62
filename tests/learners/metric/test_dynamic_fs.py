"""Dynamic FS against its definition, one support example at a time."""

import pytest
import torch
import torch.nn.functional as F

from tests.learners.metric.problems import N_BASE, close, labels_of, make_learner, randn
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand
from torchemo.core.types import BaseClasses, Batch, Episode, TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.metric.dynamic_fs import DynamicFS
from torchemo.models import MLP, Conv4
from torchemo.training.trainer import Trainer

WAY, SIZE = 3, 5
HEAD = DynamicFS(features=SIZE, base=N_BASE)
BASE = BaseClasses(torch.tensor([[4, 0, 6], [2, 5, 1]]))
FURTHER = Batch(randn(2, 4, SIZE, seed=8), torch.tensor([[3, 4, 0, 2], [6, 6, 5, 1]]))


def drawn():
    params = HEAD.init(torch.Generator().manual_seed(0))
    noise = {n: 0.2 * randn(max(t.numel(), 1), seed=5).view(t.shape) for n, t in params.items()}
    return expand({n: t.double() + noise[n] for n, t in params.items()}, 2)


def problem():
    z, q = randn(2, 6, SIZE), randn(2, 4, SIZE, seed=1)
    return z, labels_of(2, (2, 1, 3), seed=0), q, torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])


def generated(own, z, y, known):
    """The weights of one task, by loops; ``known`` are the base classes at hand."""
    weights = []
    for k in range(WAY):
        of_support, of_base = [], []
        for z_i in z[y == k]:
            unit = z_i / z_i.norm()
            asked = own["query.weight"] @ unit + own["query.bias"]
            scores = torch.stack(
                [F.cosine_similarity(asked, own["key.weight"][b], dim=0) for b in known]
            )
            attention = (own["attention_scale"] * scores).exp()
            attention = attention / attention.sum()
            rows = [own["base.weight"][b] / own["base.weight"][b].norm() for b in known]
            of_support.append(unit)
            of_base.append(sum(a * row for a, row in zip(attention, rows, strict=True)))
        mean = [torch.stack(found).mean(0) for found in (of_support, of_base)]
        weights.append(own["average"] * mean[0] + own["attend"] * mean[1])
    return torch.stack(weights)


def test_answers_are_cosines_to_weights_generated_from_all_base_classes():
    (z, y, q, _), params = problem(), drawn()
    found = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q)
    for b in range(2):
        own = {n: t[b] for n, t in params.items()}
        weights = generated(own, z[b], y[b], range(N_BASE))
        expected = own["scale"] * F.cosine_similarity(q[b][:, None], weights[None], dim=-1)
        close(found[b], expected)


@pytest.mark.parametrize("further", [None, FURTHER])
def test_the_loss_asks_for_one_of_all_base_classes(further):
    (z, y, q, target), params = problem(), drawn()
    known = BASE._replace(examples=further)
    classifier = HEAD.fit(params, z, y, n_way=WAY)
    losses = HEAD.class_losses(params, classifier, q, target, base=known)
    for b in range(2):
        own, inside = {n: t[b] for n, t in params.items()}, BASE.labels[b].tolist()
        others = [c for c in range(N_BASE) if c not in inside]
        weights = own["base.weight"].clone()
        weights[inside] = generated(own, z[b], y[b], others)
        x = q[b] if further is None else torch.cat([q[b], further.x[b]])
        labels = [inside[label] for label in target[b]]
        labels += [] if further is None else further.y[b].tolist()
        logits = own["scale"] * F.cosine_similarity(x[:, None], weights[None], dim=-1)
        close(losses[b], F.cross_entropy(logits, torch.tensor(labels)))


def test_what_is_learned_of_a_task_s_own_classes_does_not_reach_its_training_loss():
    (z, y, q, target), params = problem(), drawn()
    classifier = HEAD.fit(params, z, y, n_way=WAY)
    known = BASE._replace(examples=FURTHER)
    losses = HEAD.class_losses(params, classifier, q, target, base=known)
    for name in ("base.weight", "key.weight"):
        other = params[name].clone()
        for b in range(2):
            other[b, BASE.labels[b]] = randn(WAY, SIZE, seed=b)
        changed = {**params, name: other}
        close(HEAD.class_losses(changed, classifier, q, target, base=known), losses, 0, 0)
        refitted = HEAD.fit(changed, z, y, n_way=WAY)
        assert not torch.allclose(refitted["weight"], classifier["weight"])


def test_without_attention_it_is_a_cosine_to_the_mean_of_unit_features():
    (z, y, q, _), params = problem(), drawn()
    params |= {"attend": torch.zeros(2, SIZE).double(), "average": torch.ones(2, SIZE).double()}
    found = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q)
    unit = z / z.norm(dim=-1, keepdim=True)
    means = torch.stack(
        [torch.stack([unit[b][y[b] == k].mean(0) for k in range(WAY)]) for b in range(2)]
    )
    cosine = F.cosine_similarity(q[:, :, None], means[:, None], dim=-1)
    close(found, params["scale"][:, None, None] * cosine)


def test_attention_of_scale_zero_is_the_mean_base_weight():
    (z, y, _, _), params = problem(), drawn()
    params["attention_scale"] = torch.zeros(2).double()
    params["average"] = torch.zeros(2, SIZE).double()
    found = HEAD.fit(params, z, y, n_way=WAY)["weight"]
    mean = F.normalize(params["base.weight"], dim=-1).mean(1)
    close(found, (params["attend"] * mean)[:, None].expand_as(found))


def test_lengths_of_features_base_weights_and_keys_do_not_matter():
    (z, y, q, _), params = problem(), drawn()
    found = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q)
    longer = {n: 3 * t if n in ("base.weight", "key.weight") else t for n, t in params.items()}
    close(HEAD.logits(longer, HEAD.fit(longer, 2 * z, y, n_way=WAY), 0.5 * q), found)


def test_it_takes_over_the_weights_and_the_scale_of_a_dense_classifier():
    learner = make_learner("dynamic-fs")
    params = learner.init(torch.Generator().manual_seed(0))
    weight, scale = torch.rand(N_BASE, SIZE), torch.tensor(4.0)
    taken = learner.after_dense(params, {"weight": weight, "scale": scale})
    assert torch.equal(taken["head/base.weight"], weight)
    assert float(taken["head/scale"]) == 4
    linear = learner.after_dense(params, {"weight": weight, "bias": torch.zeros(N_BASE)})
    assert set(linear) == {"head/base.weight"}
    with pytest.raises(ConfigError, match="7 base classes of 5 features"):
        learner.after_dense(params, {"weight": weight[:, :4]})


def test_episodes_leave_a_frozen_trunk_and_its_statistics_as_they_are():
    model = Conv4(WAY, in_channels=1, image_size=16, filters=3, bn="running")
    shape = TaskShape("classification", (1, 16, 16), WAY, base_classes=N_BASE)
    y, x = torch.arange(WAY).repeat(2, 2), torch.rand(2, 6, 1, 16, 16)
    for freeze in (True, False):
        learner = build_learner(Part("dynamic-fs", {"freeze_trunk": freeze}), model, shape)
        made = Trainer(learner)
        before = {n: p.detach().clone() for n, p in made.params.items()}
        made.step(Episode(Batch(x, y), Batch(1 - x, y), base=BASE))
        moved = {n for n, p in made.params.items() if not torch.equal(p, before[n])}
        assert {"head/base.weight", "head/query.weight", "head/scale"} <= moved
        assert any("/" not in n for n in moved) == (not freeze)
        fitted = learner.fit(
            learner.start(before, Batch(x, y), base=expand(before, 2)), Batch(x, y)
        )
        assert bool(fitted.statistics) == (not freeze)


def test_tasks_of_as_many_classes_as_there_are_are_refused():
    for known in (0, WAY):
        shape = TaskShape("classification", (2,), WAY, base_classes=known)
        with pytest.raises(ConfigError, match="more base classes than a task has"):
            build_learner(Part("dynamic-fs"), MLP(WAY, n_in=2), shape)
