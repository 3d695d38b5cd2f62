"""Self-recognition: the loss, the positives, the queue, what it learns, and a bitwise resume."""

import copy
import math

import pytest
import torch

from torchemo.core.errors import CheckpointError, ConfigError, DataError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode
from torchemo.memory.keys.embedders import OwnConv, PairEmbedder
from torchemo.memory.keys.recognition import (
    SelfRecognition,
    query_as_support,
    self_recognition_loss,
)
from torchemo.memory.keys.statistics import StatisticsKey, StatisticsNetwork
from torchemo.memory.keys.transformer import MeanKey, TransformerKey

X_DIM = 12


def unit_rows(rows, seed):
    keys = torch.randn(rows, 6, generator=generator_for(seed), dtype=torch.float64)
    return keys / keys.norm(dim=1, keepdim=True)


def encoder(seed=0):
    g = generator_for(seed, "weights")
    pair = PairEmbedder(X_DIM, 1, generator=g, dim=16)
    return TransformerKey(pair, generator=g, dim=16, layers=1, heads=2, ff=32)


def episodes(step, tasks=6, n=5):
    """Tasks of two domains: a mean along the domain's direction, drowned in loud noise."""
    g = generator_for(step, "tasks")
    domain = torch.randint(2, (tasks,), generator=g)
    x = torch.randn(tasks, 2 * n, X_DIM, generator=g)
    x[..., 4:] *= 4
    x[..., 0] += 1.5 * (2 * domain[:, None] - 1)
    y = torch.randn(tasks, 2 * n, 1, generator=g)
    return Episode(Batch(x[:, :n], y[:, :n]), Batch(x[:, n:], y[:, n:]), domain)


def in_double(episode):
    both = (episode.support, episode.query)
    support, query = (Batch(part.x.double(), part.y.double()) for part in both)
    return Episode(support, query, episode.domain)


def same_domain_rate(keys, domain):
    distances = torch.cdist(keys, keys).fill_diagonal_(math.inf)
    return float((domain[distances.argmin(1)] == domain).double().mean())


# --- the loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("older", [0, 3])
def test_the_loss_is_a_loop_over_tasks_and_candidates(older):
    support, query, negatives = unit_rows(4, 0), unit_rows(4, 1), unit_rows(older, 2)
    total = 0.0
    for b in range(4):
        scores = [sum((k * c).tolist()) / 0.2 for k, c in ((support[b], c) for c in query)]
        scores += [sum((support[b] * c).tolist()) / 0.2 for c in negatives]
        total += math.log(sum(math.exp(s) for s in scores)) - scores[b]
    got = self_recognition_loss(support, query, negatives if older else None, temperature=0.2)
    assert abs(float(got) - total / 4) < 1e-12


def test_the_loss_of_indistinguishable_tasks_is_the_log_of_the_number_of_candidates():
    same = torch.ones(3, 4) / 2
    got = self_recognition_loss(same, same, torch.ones(7, 4) / 2)
    torch.testing.assert_close(got, torch.tensor(math.log(10)))


def test_the_gradient_of_the_loss_agrees_with_finite_differences():
    keys = [unit_rows(rows, seed).requires_grad_() for seed, rows in enumerate((3, 3, 2))]
    assert torch.autograd.gradcheck(self_recognition_loss, keys)


# --- positives ---------------------------------------------------------------------------------


def test_a_query_set_becomes_a_support_set_of_the_first_query_of_each_class():
    y = torch.tensor([[2, 0, 0, 1, 2, 1], [1, 1, 0, 2, 0, 2]])
    x = torch.arange(12.0).view(2, 6, 1)
    got = query_as_support(Batch(x, y), 3)
    for b in range(2):
        assert got.x[b, :, 0].tolist() == [x[b, y[b].tolist().index(c), 0] for c in range(3)]
        assert got.y[b].tolist() == [0, 1, 2]
    assert got.y.dtype == y.dtype


def test_a_regression_query_set_is_taken_whole():
    query = episodes(0).query
    assert query_as_support(query) is query


def test_a_class_without_a_query_is_refused_with_its_task():
    y = torch.tensor([[0, 1, 2], [0, 1, 1]])
    with pytest.raises(DataError, match="query set of task 1: class 2"):
        query_as_support(Batch(torch.zeros(2, 3, 1), y), 3)


# --- the queue ---------------------------------------------------------------------------------


def test_the_queue_holds_the_last_support_sets_like_a_bounded_list():
    recognition, kept = SelfRecognition(encoder(), older=5), []
    assert recognition.queue is None
    for step, tasks in enumerate((2, 2, 3, 1, 7, 4)):
        support = episodes(step, tasks=tasks).support
        recognition.push(support)
        kept = [*kept, *zip(support.x, support.y, strict=True)][-5:]
        rows = [(x.tolist(), y.tolist()) for x, y in zip(*recognition.queue, strict=True)]
        assert sorted(rows) == sorted((x.tolist(), y.tolist()) for x, y in kept)


def test_older_sets_are_encoded_anew_by_the_present_network():
    recognition, episode = SelfRecognition(encoder(), older=6), episodes(1)
    recognition.push(episodes(0).support)
    with torch.no_grad():
        recognition.encoder.cls.add_(1.0)
    key = recognition.encoder
    negatives = key(episodes(0).support)
    expected = self_recognition_loss(key(episode.support), key(episode.query), negatives)
    torch.testing.assert_close(recognition.loss(episode), expected)


def test_without_older_sets_only_the_batch_gives_negatives():
    recognition = SelfRecognition(encoder(), older=0)
    recognition.step(episodes(0))
    assert recognition.queue is None


class Whole(torch.nn.Module):
    """A key network that hides that it sees summaries alone."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, support, params=None):
        return self.inside(support, params)


def test_keeping_summaries_trains_like_keeping_the_support_sets():
    def network():
        return StatisticsNetwork(X_DIM, 1, generator=generator_for(0, "weights"), dim=8)

    short = SelfRecognition(network(), older=8)
    long = SelfRecognition(Whole(network()), older=8)
    for step in range(4):
        losses = [r.step(episodes(step)) for r in (short, long)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for ours, theirs in zip(short.encoder.parameters(), long.encoder.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert long.queue.x.shape == (8, 5, X_DIM)
    assert short.queue.x.shape == (8, short.encoder.layers[0].in_features)


def test_only_networks_that_encode_whole_support_sets_pause_by_default():
    network = StatisticsNetwork(X_DIM, 1, generator=generator_for(0, "weights"), dim=8)
    assert SelfRecognition(network).every == 1
    assert SelfRecognition(encoder()).every == 16
    assert SelfRecognition(network, every=4).every == 4


def test_support_sets_of_another_size_are_refused_before_anything_changes():
    recognition = SelfRecognition(encoder())
    recognition.step(episodes(0))
    before = copy.deepcopy((recognition.state_dict(), recognition.encoder.state_dict()))
    with pytest.raises(ShapeError, match=r"\[4, 12\] beside older"):
        recognition.step(episodes(1, n=4))
    after = (recognition.state_dict(), recognition.encoder.state_dict())
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)


# --- training ----------------------------------------------------------------------------------


def test_a_step_is_one_step_of_adam_on_the_loss():
    recognition, twin = SelfRecognition(encoder().double(), lr=0.01), encoder().double()
    adam = torch.optim.Adam(twin.parameters(), lr=0.01)
    for step in range(3):
        episode = in_double(episodes(step))
        older = [twin(in_double(episodes(s)).support) for s in range(step)]
        loss = self_recognition_loss(
            twin(episode.support), twin(episode.query), torch.cat(older) if older else None
        )
        adam.zero_grad()
        loss.backward()
        adam.step()
        assert recognition.step(episode) == pytest.approx(loss.item(), rel=1e-9)
    for got, expected in zip(recognition.encoder.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_a_step_leaves_gradients_collected_by_an_outer_loop_alone():
    recognition = SelfRecognition(encoder())
    recognition.encoder(episodes(0).support).sum().backward()
    kept = {name: p.grad.clone() for name, p in recognition.encoder.named_parameters()}
    recognition.step(episodes(1))
    assert all(torch.equal(p.grad, kept[n]) for n, p in recognition.encoder.named_parameters())


@pytest.mark.parametrize("seed", [0, 1])
def test_sixty_steps_teach_keys_to_tell_two_domains_apart(seed):
    test = episodes(10**6, tasks=200)
    untrained, recognition = encoder(seed), SelfRecognition(encoder(seed), lr=3e-3, older=18)
    for step in range(60):
        recognition.step(episodes(1000 * seed + step))
    with torch.no_grad():
        before = same_domain_rate(untrained(test.support), test.domain)
        after = same_domain_rate(recognition.encoder(test.support), test.domain)
    assert before < 0.75
    assert after > 0.95


def test_images_are_trained_against_one_query_of_each_class():
    g = generator_for(0)
    conv = OwnConv(3, 16, generator=g, filters=4, dim=8)
    recognition = SelfRecognition(MeanKey(conv), n_way=2, older=4)
    x = torch.rand(3, 8, 3, 16, 16, generator=g)
    episode = Episode(
        Batch(x[:, :2], torch.tensor([[0, 1]] * 3)), Batch(x[:, 2:], torch.tensor([[0, 1] * 3] * 3))
    )
    before = copy.deepcopy(recognition.encoder.state_dict())
    key = recognition.encoder
    expected = self_recognition_loss(
        key(episode.support), key(Batch(x[:, 2:4], torch.tensor([[0, 1]] * 3)))
    )
    torch.testing.assert_close(recognition.loss(episode), expected)
    assert recognition.step(episode) == pytest.approx(expected.item())
    weights = [n for n, p in key.named_parameters() if p.ndim > 1]
    assert not any(torch.equal(before[n], key.state_dict()[n]) for n in weights)


def test_settling_multiplies_the_rate():
    recognition = SelfRecognition(encoder(), lr=1e-3, every=1)
    recognition.settle()
    assert recognition.lr == pytest.approx(2e-4)
    before = recognition.encoder.cls.detach().clone()
    recognition.step(episodes(0))
    # The first step of Adam has the length of its rate in every coordinate.
    moved = (recognition.encoder.cls.detach() - before).abs().max()
    assert float(moved) == pytest.approx(2e-4, rel=1e-2)


@pytest.mark.parametrize(
    ("every", "settled", "share"), [(1, 0.5, 0.5), (2, 0.2, 0.4), (4, 0.2, 0.8), (16, 0.2, 1.0)]
)
def test_pauses_count_as_settling_and_no_rate_is_raised(every, settled, share):
    recognition = SelfRecognition(encoder(), lr=1e-3, every=every, settled=settled)
    recognition.settle()
    assert recognition.lr == pytest.approx(share * 1e-3)


# --- resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(stop):
    straight = SelfRecognition(encoder(), older=8, every=1, settled=0.5)
    resumed = SelfRecognition(encoder(seed=1), older=8)
    for step in range(5):
        if step == stop:
            straight.settle()
            weights, state = copy.deepcopy((straight.encoder.state_dict(), straight.state_dict()))
            resumed.encoder.load_state_dict(weights)
            resumed.load_state_dict(state)
        expected = straight.step(episodes(step, tasks=3))
        if step >= stop:
            assert resumed.step(episodes(step, tasks=3)) == expected
    pairs = ((straight.state_dict(), resumed.state_dict()),)
    pairs += ((straight.encoder.state_dict(), resumed.encoder.state_dict()),)
    for a, b in pairs:
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_an_early_state_can_be_loaded_over_a_later_one():
    recognition = SelfRecognition(encoder())
    weights, state = copy.deepcopy((recognition.encoder.state_dict(), recognition.state_dict()))
    first = [recognition.step(episodes(step)) for step in range(3)]
    recognition.encoder.load_state_dict(weights)
    recognition.load_state_dict(state)
    assert [recognition.step(episodes(step)) for step in range(3)] == first


def test_a_state_that_lost_its_queue_is_refused():
    recognition = SelfRecognition(encoder())
    recognition.step(episodes(0))
    state = recognition.state_dict()
    del state["queue.x"], state["queue.y"]
    with pytest.raises(CheckpointError, match=r"queue\.x"):
        SelfRecognition(encoder()).load_state_dict(state)


def test_a_saved_state_is_a_copy():
    recognition = SelfRecognition(encoder())
    recognition.step(episodes(0))
    state = recognition.state_dict()
    before = copy.deepcopy(state)
    recognition.step(episodes(1))
    assert all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.parametrize("name", ["pushed", "lr", "queue.x", "adam.step.cls", "adam.exp_avg.cls"])
@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_a_damaged_state_is_refused_and_changes_nothing(name, fault):
    recognition = SelfRecognition(encoder())
    recognition.step(episodes(0))
    state = recognition.state_dict()
    good = copy.deepcopy(state)
    state["pushed"] = state["pushed"] + 1
    if fault == "missing":
        del state[name]
    else:
        state[name] = state[name].new_zeros(3)
    with pytest.raises(CheckpointError, match="should have shape"):
        recognition.load_state_dict(state)
    assert all(torch.equal(good[n], v) for n, v in recognition.state_dict().items())


def test_a_state_with_unknown_tensors_or_another_queue_is_refused():
    recognition = SelfRecognition(encoder(), older=4)
    recognition.step(episodes(0))
    with pytest.raises(CheckpointError, match="unknown"):
        recognition.load_state_dict(recognition.state_dict() | {"unknown": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"queue\.x"):
        SelfRecognition(encoder(), older=5).load_state_dict(recognition.state_dict())


# --- refusals ----------------------------------------------------------------------------------


def test_a_key_network_without_weights_is_refused():
    with pytest.raises(ConfigError, match="0 trainable tensors"):
        SelfRecognition(StatisticsKey(3))


@pytest.mark.parametrize("options", [{"older": -1}, {"temperature": 0.0}])
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError, match="self-recognition"):
        SelfRecognition(encoder(), **options)


def test_a_pause_below_one_step_is_refused():
    with pytest.raises(ConfigError, match="every should be None or 1 and more, got 0"):
        SelfRecognition(encoder(), every=0)
