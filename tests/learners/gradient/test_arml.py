"""ARML and HSML: gates, graph, tree, losses."""

import pytest
import torch
import torch.nn.functional as F

from tests.learners.gradient.problems import (
    IMAGES,
    LINE,
    learner_part,
    make_episode,
    make_params,
    point_episode,
    points,
    vectors,
    with_maml,
)
from torchemo.config.presets import preset
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.prototypes import class_means
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.arml import ARML, relations
from torchemo.learners.gradient.hsml import HSML
from torchemo.learners.gradient.parts import ImageEmbedding, PointEmbedding, soft_assignment
from torchemo.learners.gradient.parts.task_gated import GATE, TASK, TaskGated
from torchemo.learners.learner import scoped
from torchemo.models import MLP, Conv4
from torchemo.training.predict import predict
from torchemo.training.step import outer_step

READERS = ("arml", "hsml")
SMALL = {"task_dim": 3, "vertices": 2, "tree": (3, 2)}


def opened(params):
    """Set every gate to exactly one: the sigmoid of 40 rounds to it."""
    found = dict(params)
    for name, tensor in params.items():
        if name.startswith(GATE):
            found[name] = torch.full_like(tensor, 40.0 * name.endswith("bias"))
    return found


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["classes", "points"])
def test_open_gates_are_maml_bit_for_bit(name, kind):
    learner = (vectors if kind == "classes" else points)(name, aux_weight=0.0, **SMALL)
    episode = make_episode() if kind == "classes" else point_episode()
    params, maml, theta = with_maml(learner)
    ours, theirs = outer_step(learner, opened(params), episode), outer_step(maml, theta, episode)
    assert torch.equal(ours.losses, theirs.losses)
    for network_tensor in theta:
        assert torch.equal(ours.gradients[network_tensor], theirs.gradients[network_tensor])
    gated = outer_step(learner, params, episode)
    assert not torch.allclose(gated.losses, theirs.losses)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["classes", "points"])
def test_the_outer_loss_is_the_query_loss_plus_the_weighted_reconstruction(name, kind):
    make = vectors if kind == "classes" else points
    episode = make_episode() if kind == "classes" else point_episode()
    learner = make(name, aux_weight=0.25, **SMALL)
    params = make_params(learner)
    with_loss = outer_step(learner, params, episode)
    plain = outer_step(make(name, aux_weight=0.0, **SMALL), params, episode)
    _, own = learner.reader(scoped(params, TASK), episode.support)
    assert (own > 0).all()
    torch.testing.assert_close(with_loss.losses, plain.losses + 0.25 * own, rtol=1e-12, atol=1e-14)
    for tensor in with_loss.gradients:
        if tensor.startswith(GATE):  # gates do not see the reconstruction
            assert torch.equal(with_loss.gradients[tensor], plain.gradients[tensor])
    code = [n for n in with_loss.gradients if n.startswith(TASK + "code/")]
    assert any(not torch.equal(with_loss.gradients[n], plain.gradients[n]) for n in code)


@pytest.mark.parametrize("name", READERS)
def test_the_outer_loss_reaches_every_parameter(name):
    learner = vectors(name, aux_weight=0.1, **SMALL)
    params = make_params(learner)
    for tensor, gradient in outer_step(learner, params, make_episode()).gradients.items():
        # One convolution: what vertices tell each other does not get to a prototype.
        unheard = tensor.startswith(TASK + "vertex-edge/")
        assert bool(gradient.abs().sum() > 0) != unheard, tensor


@pytest.mark.parametrize("name", READERS)
def test_workers_change_no_bit_on_images(name):
    learner = build_learner(
        Part(name, {"steps": 2, "task_dim": 8}), Conv4(3, image_size=16, filters=4), IMAGES
    )
    params = learner.init(torch.Generator().manual_seed(0))
    g, y = torch.Generator().manual_seed(1), torch.arange(3).repeat(3, 2)
    episode = Episode(*(Batch(torch.rand(3, 6, 3, 16, 16, generator=g), y) for _ in range(2)))
    one, two = (outer_step(learner, params, episode, workers=w) for w in (1, 2))
    for tensor in one.gradients:
        assert torch.equal(one.gradients[tensor], two.gradients[tensor])
    embedding = [n for n in one.gradients if n.startswith(TASK + "embed/conv")]
    assert len(embedding) == 2
    assert all(one.gradients[n].abs().sum() > 0 for n in embedding)


def reader(vertices=2):
    return ARML(PointEmbedding(2, None, dim=4), 3, vertices=vertices, width=2.0)


def prototypes(arml, params, support):
    embedded = arml.embedding(scoped(params, "embed/"), support)
    return class_means(embedded, support.y, n_way=3)


def reader_params(arml):
    drawn = arml.init(torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(1)
    return {n: t.double() + 0.1 * torch.randn(t.shape, generator=g) for n, t in drawn.items()}


def test_the_graph_is_symmetric_without_loops_and_its_cross_rows_sum_to_one():
    arml = reader()
    params = reader_params(arml)
    c = prototypes(arml, params, make_episode().support)
    nodes, adjacency = arml.graph(params, c)
    assert nodes.shape == (2, 5, 4)
    assert torch.equal(adjacency, adjacency.transpose(1, 2))
    assert not adjacency.diagonal(dim1=1, dim2=2).any()
    torch.testing.assert_close(adjacency[:, :3, 3:].sum(-1), torch.ones(2, 3).double())
    assert (adjacency[:, 0, 1] > 0).all()
    w, b = params["prototype-edge/weight"][0], params["prototype-edge/bias"][0]
    for i, j in ((0, 1), (2, 0)):
        edge = torch.sigmoid((w * (c[:, i] - c[:, j]).abs()).sum(-1) + b)
        torch.testing.assert_close(adjacency[:, i, j], edge, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("vertices", [0, 2])
def test_prototypes_hear_their_neighbours_by_one_graph_convolution(vertices):
    arml = reader(vertices)
    params = reader_params(arml)
    c = prototypes(arml, params, make_episode().support)
    nodes, adjacency = arml.graph(params, c)
    heard = arml.passed(params, c)
    assert heard.shape == c.shape
    for b in range(2):
        linked = adjacency[b] + torch.eye(3 + vertices).double()
        mean = torch.stack(
            [(linked[i, :, None] * nodes[b]).sum(0) / linked[i].sum() for i in range(3)]
        )
        expected = torch.tanh(mean @ params["graph/weight"].T + params["graph/bias"])
        torch.testing.assert_close(heard[b], expected, rtol=1e-12, atol=1e-14)
    if not vertices:
        assert torch.equal(adjacency, relations(scoped(params, "prototype-edge/"), c))


def test_relabelling_permutes_prototypes_and_changes_the_description():
    """A GRU reads classes in label order: a fact of the published method."""
    arml = reader()
    params, support = reader_params(arml), make_episode().support
    order = torch.tensor([2, 0, 1])
    moved = Batch(support.x, order[support.y])
    a, b = (prototypes(arml, params, s) for s in (support, moved))
    torch.testing.assert_close(a, b[:, order], rtol=1e-12, atol=1e-14)
    codes = [arml(params, s)[0] for s in (support, moved)]
    assert not torch.allclose(*codes)


def test_a_tree_of_single_clusters_is_one_path_through_a_network():
    hsml = HSML(PointEmbedding(2, None, dim=2), 3, code=4, tree=(1, 1))
    p = {n: t.double() for n, t in hsml.init(torch.Generator().manual_seed(0)).items()}
    g = torch.randn(3, 4, generator=torch.Generator().manual_seed(2)).double()
    h = g
    for layer in ("leaf/", "layer0/"):
        h = torch.tanh(h @ p[layer + "weight"][0].T + p[layer + "bias"][0])
    expected = torch.tanh(h @ p["root/weight"].T + p["root/bias"])
    torch.testing.assert_close(hsml.path(p, g), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gate", ["linear", "distance"])
def test_the_tree_is_its_equations_in_loops(gate):
    hsml = HSML(PointEmbedding(2, None, dim=2), 3, code=4, tree=(3, 2, 2), width=2.0, gate=gate)
    g = torch.Generator().manual_seed(3)
    drawn = hsml.init(g)
    p = {n: t.double() + 0.3 * torch.randn(t.shape, generator=g) for n, t in drawn.items()}
    codes = torch.randn(2, 4, generator=g).double()
    share = soft_assignment(codes[:, None], p["leaf/centre"], width=2.0)
    torch.testing.assert_close(share.sum(-1), torch.ones(2, 1).double())
    for b in range(2):
        nodes = [
            share[b, 0, i] * torch.tanh(p["leaf/weight"][i] @ codes[b] + p["leaf/bias"][i])
            for i in range(3)
        ]
        for layer in ("layer0/", "layer1/"):
            w, c = p[layer + "gate"], p[layer + "gate_bias"]
            above = [torch.zeros(4).double()] * 2
            for u in nodes:
                logits = w @ u + c if gate == "linear" else -0.5 * ((u - w).square().sum(1) + c)
                choice = torch.softmax(logits, 0)
                assert float(choice.sum()) == pytest.approx(1)
                for j in range(2):
                    moved = torch.tanh(p[layer + "weight"][j] @ u + p[layer + "bias"][j])
                    above[j] = above[j] + choice[j] * moved
            nodes = above
        root = sum(torch.tanh(p["root/weight"] @ v + p["root/bias"]) for v in nodes)
        torch.testing.assert_close(hsml.path(p, codes)[b], root, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("autoencoder", ["rnn", "mean"])
def test_hsml_reads_at_most_ten_examples_with_their_labels(autoencoder):
    hsml = HSML(PointEmbedding(2, None, dim=2), 3, code=4, autoencoder=autoencoder)
    p = {n: t.double() for n, t in hsml.init(torch.Generator().manual_seed(0)).items()}
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(1, 12, 2, generator=g).double(), torch.arange(12)[None] % 3
    code, _ = hsml(p, Batch(x, y))
    beyond, within = x.clone(), y.clone()
    beyond[:, 10:] += 1
    within[:, 0] = 2
    assert torch.equal(hsml(p, Batch(beyond, y))[0], code)
    assert not torch.allclose(hsml(p, Batch(x, within))[0], code)


CLASSES, NUMBERS = PointEmbedding(2, None, dim=3), PointEmbedding(2, 1, dim=3)
EVERY_READER = {
    "arml": ARML(CLASSES, 3, vertices=2),
    "arml, first draw": ARML(CLASSES, 3, vertices=2, draw="tf"),
    "arml, points": ARML(NUMBERS, None, vertices=2, width=2.0),
    "hsml": HSML(CLASSES, 3, code=4),
    "hsml, mean": HSML(CLASSES, 3, code=4, autoencoder="mean"),
    "hsml, distance": HSML(CLASSES, 3, code=4, gate="distance"),
    "hsml, points": HSML(NUMBERS, None, code=4, width=2.0),
    "arml, images": ARML(ImageEmbedding(3, 16, 16, dim=3), 3, vertices=2),
}


@pytest.mark.parametrize("name", EVERY_READER)
def test_descriptions_and_losses_have_the_right_gradients(name):
    reader = EVERY_READER[name]
    params = {n: t.double() for n, t in reader.init(torch.Generator().manual_seed(0)).items()}
    g = torch.Generator().manual_seed(1)
    shape = (16, 16) if name.endswith("images") else ()
    x = torch.rand(2, 6, *((3, *shape) if shape else (2,)), generator=g, dtype=torch.float64)
    y = torch.arange(3).repeat(2, 2) if reader.n_way else torch.rand(2, 6, 1, generator=g).double()

    def described(*tensors):
        return reader(dict(zip(params, tensors, strict=True)), Batch(x, y))

    leaves = tuple(t.requires_grad_() for t in params.values())
    assert torch.autograd.gradcheck(described, leaves, fast_mode=True)


@pytest.mark.parametrize("name", READERS)
def test_the_published_weight_is_converted_to_a_mean_loss_over_these_queries(name):
    def weight(n_shot, n_query):
        shape = TaskShape("classification", (2,), 5, n_shot=n_shot, n_query=n_query)
        return build_learner(
            learner_part(name, **SMALL), MLP(5, n_in=2, hidden=(4,)), shape
        ).aux_weight

    assert weight(1, 15) == pytest.approx(0.01 / 75)
    assert weight(5, 15) == pytest.approx(0.01 * 5 / 75)
    assert weight(1, 5) == pytest.approx(0.01 / 25)
    assert points(name, **SMALL).aux_weight == 0.01


def test_published_sizes_are_those_of_the_cards():
    learner = preset("arml-published").learner
    net = Conv4(5, image_size=84)
    made = build_learner(learner, net, TaskShape("classification", (3, 84, 84), 5))
    params = made.init(torch.Generator().manual_seed(0))
    gates = sum(p.numel() for n, p in params.items() if n.startswith(GATE))
    assert gates == 257 * 32_645
    assert 13e6 < sum(p.numel() for p in params.values()) < 15e6


def test_descriptions_of_points_and_answers_before_any_step_use_the_gates():
    learner = points("arml", **SMALL)
    params, episode = make_params(learner), point_episode()
    theta = {n: p[None].expand(3, *p.shape) for n, p in params.items() if "/" not in n}
    start = learner.start(params, episode.support, base=theta)
    out = predict(learner, params, episode).outputs[0]
    torch.testing.assert_close(out, LINE(start.theta, episode.query.x), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(start.about["key"].norm(dim=1), torch.ones(3).double())
    assert not start.about["key"].requires_grad
    assert F.cosine_similarity(start.about["key"][0], start.about["key"][1], dim=0) < 1 - 1e-6


def test_bad_switches_are_refused():
    embedding = PointEmbedding(2, None, dim=2)
    with pytest.raises(ConfigError, match="vertices"):
        ARML(embedding, 3, vertices=-1)
    with pytest.raises(ConfigError, match="tree"):
        HSML(embedding, 3, tree=())
    with pytest.raises(ConfigError, match="aux_weight"):
        TaskGated(vectors("maml").loop, reader(), aux_weight=-1.0)
