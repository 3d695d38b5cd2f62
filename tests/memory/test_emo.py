"""EMO's three verbs, end to end, and every switch of it."""

import hashlib
import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn

from torchemo.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MemoryWriteError,
    ShapeError,
)
from torchemo.core.losses import cross_entropy
from torchemo.core.prototypes import class_means
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch
from torchemo.memory.aggregators import Gated, Mean, Sum
from torchemo.memory.emo import EMO
from torchemo.memory.keys.embedders import PairEmbedder
from torchemo.memory.keys.transformer import MeanKey
from torchemo.memory.recall import Retrieval
from torchemo.memory.search import RandomIndex
from torchemo.memory.selective import SkipUnfamiliar
from torchemo.memory.store import EpisodicMemory

SHAPES = {"conv.weight": (2, 3), "head.weight": (3, 2), "head.bias": (3,)}
HEAD = ("head.weight", "head.bias")
DIM = 2


def randn(*shape, seed=0):
    return torch.randn(shape, generator=generator_for(seed, "emo"))


def tree(tasks, *, seed=0):
    return {n: randn(tasks, *s, seed=10 * seed + i) for i, (n, s) in enumerate(SHAPES.items())}


def digest(module):
    state = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        state.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def build(capacity=6, *, k=2, aggregator=None, retrieval=None, head=HEAD, **options):
    store = EpisodicMemory(capacity, DIM)
    return EMO(store, retrieval or Retrieval(k), aggregator or Sum(), head=head, **options)


def taught(emo, *, tasks=4, seed=5):
    """Remember some tasks; return their keys and values."""
    keys, values = randn(tasks, DIM, seed=seed), tree(tasks, seed=seed)
    emo.remember(emo.recall(keys), values)
    return keys, values


def bitwise(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# -- the three verbs ---------------------------------------------------------------------------------


def test_recall_combine_and_remember_in_a_loop_of_ones_own():
    emo = build(3, k=2)
    past = []  # what a reader of the paper would keep: (key, gradient), oldest first
    for batch in range(6):
        keys, grads = randn(1, DIM, seed=batch), tree(1, seed=batch)
        recall = emo.recall(keys)
        near = sorted(past, key=lambda p: float((p[0] - keys[0]).square().sum()))[:2]
        combined = emo.combine(grads, recall)
        for name, grad in grads.items():
            expected = grad[0] + (
                sum(value[name] for _, value in near) / len(near) if near else 0.0
            )
            assert torch.allclose(combined[name][0], expected, atol=1e-6)
        emo.remember(recall, grads)
        # LRU on the list: the nearest comes last, then the new task.
        for entry in reversed(near):
            past = [p for p in past if p is not entry] + [entry]
        past = past[-2:] if len(past) == 3 else past
        past.append((keys[0], {name: grad[0] for name, grad in grads.items()}))
    assert len(emo.store) == 3


@pytest.mark.parametrize(
    "aggregator", [Sum(), Mean(2), Mean(2, rescale="own"), Gated(tuple(SHAPES))]
)
def test_an_empty_memory_returns_the_very_same_gradients(aggregator):
    emo, grads = build(aggregator=aggregator), tree(2)
    recall = emo.recall(randn(2, DIM))
    for step in range(3):
        combined = emo.combine(grads, recall, step=step)
        assert all(combined[name] is grads[name] for name in SHAPES)
    assert emo.opening(recall) is None
    assert emo.offset(recall) == {}


@pytest.mark.parametrize("aggregator", [Sum(), Mean(2), Mean(2, pad=True)])
def test_a_memory_without_slots_is_the_base_learner(aggregator):
    emo, grads = build(0, aggregator=aggregator, recall_step="always"), tree(2)
    before = digest(emo)
    recall = emo.recall(randn(2, DIM))
    assert emo.combine(grads, recall) is grads
    assert emo.opening(recall) is None
    emo.remember(recall, grads)
    assert digest(emo) == before


def test_a_padded_mean_scales_the_own_gradient_of_an_empty_memory():
    emo, grads = build(aggregator=Mean(3, pad=True)), tree(1)
    combined = emo.combine(grads, emo.recall(randn(1, DIM)))
    assert all(torch.allclose(combined[n], grads[n] / 4) for n in SHAPES)


def test_a_bound_recall_answers_as_emo_does():
    emo = build(recall_step="always", memory_steps="first")
    taught(emo)
    recall, grads = emo.recall(randn(2, DIM)), tree(2)
    bound = emo.bind(recall)
    for step in (0, 1):
        assert bitwise(bound.direction(grads, step), emo.combine(grads, recall, step=step))
    assert bitwise(bound.opening(), emo.opening(recall))


def test_tensors_that_are_not_remembered_keep_their_gradient():
    emo = build()
    taught(emo)
    grads = tree(1) | {"new": randn(1, 4)}
    combined = emo.combine(grads, emo.recall(randn(1, DIM)))
    assert torch.equal(combined["new"], grads["new"])
    assert not torch.equal(combined["conv.weight"], grads["conv.weight"])


def test_float64_gradients_and_keys_work_with_a_float32_memory():
    emo = build(k=1)
    keys, values = taught(emo)
    grads = {name: value[:1].double() for name, value in values.items()}
    combined = emo.combine(grads, emo.recall(keys[:1].double()))
    for name in SHAPES:
        assert combined[name].dtype == torch.float64
        assert torch.allclose(combined[name], 2 * grads[name])


# -- A6: which steps, which gradient -----------------------------------------------------------------


def test_memory_steps_says_at_which_inner_steps_the_recall_counts():
    grads = tree(2)
    recalled = None
    for use, factors in (("all", [1, 1, 1]), ("first", [1, 0, 0]), (0.5, [1, 0.5, 0.25])):
        emo = build(memory_steps=use)
        taught(emo)
        recall = emo.recall(randn(2, DIM))
        recalled = {n: v.mean(1) for n, v in recall.values.items()}
        for step, factor in enumerate(factors):
            combined = emo.combine(grads, recall, step=step)
            for name in SHAPES:
                expected = grads[name] + factor * recalled[name]
                assert torch.allclose(combined[name], expected, atol=1e-6)
    assert recalled is not None


def test_steps_that_do_not_use_the_recall_return_the_very_same_gradients():
    emo, grads = build(memory_steps="first"), tree(1)
    taught(emo)
    combined = emo.combine(grads, emo.recall(randn(1, DIM)), step=1)
    assert all(combined[name] is grads[name] for name in SHAPES)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("first", lambda g, q, r: g[0]),
        ("last", lambda g, q, r: g[2]),
        ("mean", lambda g, q, r: (g[0] + g[1] + g[2]) / 3),
        ("per_step", lambda g, q, r: torch.stack([g[0], g[1], g[2]], 1)),
        ("query", lambda g, q, r: q),
        ("meta", lambda g, q, r: r),
    ],
)
def test_content_says_which_gradient_is_remembered(content, expected):
    emo = build(content=content)
    path = tuple(tree(2, seed=s) for s in range(3))
    path = tuple({n: g.requires_grad_() * 1.0 for n, g in one.items()} for one in path)
    query, rows = tree(2, seed=7), tree(2, seed=8)
    value = emo.value(path, query=query, rows=rows)
    for name in SHAPES:
        wanted = expected([one[name] for one in path], query[name], rows[name])
        assert torch.allclose(value[name], wanted.detach())
        assert not value[name].requires_grad


@pytest.mark.parametrize("content", ["first", "per_step", "query", "meta"])
def test_a_gradient_that_is_not_there_cannot_be_remembered(content):
    with pytest.raises(ConfigError, match=content):
        build(content=content).value(())


def test_per_step_values_meet_the_gradient_of_their_own_step():
    emo = build(k=1, content="per_step", memory_steps="all")
    key, path = randn(1, DIM), tuple(tree(1, seed=s) for s in range(3))
    emo.remember(emo.recall(key), emo.value(path))
    recall, grads = emo.recall(key), tree(1, seed=9)
    for step, stored in ((0, 0), (1, 1), (2, 2), (5, 2)):  # later steps use the last
        combined = emo.combine(grads, recall, step=step)
        for name in SHAPES:
            assert torch.allclose(combined[name], grads[name] + path[stored][name])


def test_extra_values_are_remembered_beside_the_gradients():
    for content in ("first", "per_step"):
        emo = build(k=1, content=content, memory_steps="all")
        key, path = randn(1, DIM), (tree(1), tree(1, seed=1))
        emo.remember(emo.recall(key), emo.value(path, extra={"rate": torch.full((1, 2), 3.0)}))
        combined = emo.combine({"rate": torch.ones(1, 2)}, emo.recall(key), step=0)
        assert combined["rate"].tolist() == [[4.0, 4.0]]


def test_value_scale_stores_a_multiple():
    emo, path = build(value_scale=15.0), (tree(2),)
    for name, value in emo.value(path).items():
        assert torch.allclose(value, 15 * path[0][name])


# -- A4, A7, A25: recall step, heads, clipping -------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "training", "evaluation"),
    [("off", False, False), ("eval_only", False, True), ("always", True, True)],
)
def test_the_recall_step_opens_when_chosen(chosen, training, evaluation):
    emo = build(recall_step=chosen)
    taught(emo)
    for mode, opens in ((True, training), (False, evaluation)):
        emo.train(mode)
        recall = emo.recall(randn(2, DIM))
        opening = emo.opening(recall)
        assert (opening is not None) == opens
        if opening is not None:
            for name in SHAPES:
                assert torch.allclose(opening[name], recall.values[name].mean(1), atol=1e-6)


def test_the_recall_step_of_per_step_values_is_that_of_the_first_step():
    emo = build(k=1, content="per_step", recall_step="always")
    key, path = randn(1, DIM), (tree(1), tree(1, seed=1))
    emo.remember(emo.recall(key), emo.value(path))
    assert bitwise(emo.opening(emo.recall(key)), path[0])


def test_dropped_heads_are_neither_stored_nor_combined():
    emo, path = build(head_align="drop"), (tree(2),)
    value = emo.value(path)
    assert set(value) == {"conv.weight"}
    key = randn(2, DIM)
    emo.remember(emo.recall(key), value)
    grads = tree(2, seed=3)
    combined = emo.combine(grads, emo.recall(key))
    assert all(torch.equal(combined[name], grads[name]) for name in HEAD)
    assert not torch.equal(combined["conv.weight"], grads["conv.weight"])


WAY = 3


class ByImage(nn.Module):
    """A key encoder whose embeddings are the inputs themselves."""

    dim = DIM

    def embed(self, support, params=None):
        return support.x

    def forward(self, support, params=None):
        return support.x.mean(1)

    def prototypes(self, support, n_way, *, params=None):
        return class_means(support.x, support.y, n_way=n_way)


def head_gradient(support):
    """Gradient of the support loss in a head of zeros, per task."""
    tasks = support.x.shape[0]
    weight = torch.zeros(tasks, WAY, DIM, requires_grad=True)
    bias = torch.zeros(tasks, WAY, requires_grad=True)
    losses = cross_entropy(support.x @ weight.transpose(1, 2) + bias[:, None], support.y)
    found = torch.autograd.grad(losses.sum(), [weight, bias])
    return {"head.weight": found[0] + 0.1, "head.bias": found[1]}


@pytest.mark.parametrize("content", ["first", "per_step"])
def test_aligned_heads_recall_the_same_task_under_other_labels(content):
    x, y = randn(1, 6, DIM), torch.tensor([[0, 1, 2, 0, 1, 2]])
    first, again = Batch(x, y), Batch(x, torch.tensor([2, 0, 1])[y])
    combined = {}
    for align in ("none", "hungarian"):
        emo = build(k=1, head_align=align, n_way=WAY, encoder=ByImage(), content=content)
        keys = emo.encode(first)
        path = (head_gradient(first),)
        emo.remember(emo.recall(keys, support=first), emo.value(path))
        own = head_gradient(again)
        combined[align] = emo.combine(own, emo.recall(keys, support=again))
    for name in HEAD:
        assert torch.allclose(combined["hungarian"][name], 2 * own[name], atol=1e-6)
    assert not torch.allclose(combined["none"]["head.weight"], 2 * own["head.weight"], atol=1e-3)


def test_aligned_heads_need_the_support_sets():
    emo = build(head_align="hungarian", n_way=WAY, encoder=ByImage())
    with pytest.raises(ConfigError, match="support"):
        emo.recall(randn(1, DIM))


def test_value_clip_limits_recalled_tensors_to_a_multiple_of_the_own_norm():
    emo = build(k=2, value_clip=0.5)
    keys = randn(2, DIM)
    values = tree(2)
    values["conv.weight"][0] *= 100
    values["conv.weight"][1] *= 1e-3
    emo.remember(emo.recall(keys), values)
    recall, grads = emo.recall(keys[:1]), tree(1, seed=1)
    combined = emo.combine(grads, recall)
    limit = 0.5 * grads["conv.weight"].norm()
    large = recall.values["conv.weight"][0, 0] * limit / recall.values["conv.weight"][0, 0].norm()
    small = recall.values["conv.weight"][0, 1]
    expected = grads["conv.weight"][0] + (large + small) / 2
    assert torch.allclose(combined["conv.weight"][0], expected, atol=1e-5)


# -- A23 and tags ------------------------------------------------------------------------------------


def test_domains_are_remembered_and_recalled():
    emo, keys = build(), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    emo.remember(emo.recall(keys, domain=torch.tensor([4, 7])), tree(2))
    recall = emo.recall(keys[1:], domain=torch.tensor([7]))
    assert recall.notes["domain"].tolist() == [[7, 4]]


def test_rekeying_moves_stored_keys_to_where_the_encoder_now_is():
    encoder = MeanKey(PairEmbedder(1, 1, generator=generator_for(0, "key"), dim=DIM), unit=False)
    emo = build(encoder=encoder, rekey_every=2)
    supports = [Batch(randn(2, 5, 1, seed=s), randn(2, 5, 1, seed=s + 9)) for s in range(2)]
    old = [emo.encode(s).detach() for s in supports]
    emo.remember(emo.recall(old[0], support=supports[0]), tree(2))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(-2.0)
    assert torch.equal(emo.store.keys[:2], old[0])
    emo.remember(emo.recall(old[1], support=supports[1]), tree(2))
    assert torch.allclose(emo.store.keys[:4], -2 * torch.cat(old), atol=1e-6)
    assert not emo.store.keys.requires_grad


def test_rekeying_needs_stored_support_sets():
    encoder = MeanKey(PairEmbedder(1, 1, generator=generator_for(0, "key"), dim=DIM))
    emo = build(encoder=encoder)
    taught(emo)
    with pytest.raises(ConfigError, match="re-keying"):
        emo.rekey()


def test_ages_are_counted_in_remembered_batches():
    emo = build(retrieval=Retrieval(9, max_age=1))
    taught(emo, tasks=2)
    assert emo.recall(randn(1, DIM)).m == 2
    taught(emo, tasks=1, seed=6)
    assert emo.recall(randn(1, DIM)).slots.tolist() == [[2]]


# -- groups ------------------------------------------------------------------------------------------


def test_a_memory_per_group_recalls_and_touches_the_slots_of_its_own_group():
    emo = build(4, k=3, scope="group")
    keys = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    emo.remember(emo.recall(keys, group=torch.tensor([0, 1, 1])), tree(3))
    recall, grads = emo.recall(keys[:1], group=torch.tensor([1])), tree(1, seed=9)
    assert recall.m == 3
    combined = emo.combine(grads, recall)
    for name, stored in tree(3).items():
        assert torch.allclose(combined[name][0], grads[name][0] + stored[1:].mean(0), atol=1e-6)
    emo.remember(recall, grads)
    assert emo.store.ledger.recalls.tolist() == [0, 1, 1, 0]
    assert emo.store.notes["group"].tolist() == [0, 1, 1, 1]


def test_a_memory_per_group_needs_groups_and_a_shared_one_does_not_look_at_them():
    with pytest.raises(ConfigError, match="groups tasks"):
        build(scope="group").recall(randn(1, DIM))
    emo = build()
    emo.remember(emo.recall(randn(1, DIM), group=torch.tensor([3])), tree(1))
    assert emo.store.notes == {}


# -- A3: what learns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["uniform", "softmax"])
def test_the_key_network_learns_through_softmax_weights_only(weights):
    encoder = MeanKey(PairEmbedder(1, 1, generator=generator_for(0, "key"), dim=DIM))
    emo = build(encoder=encoder, retrieval=Retrieval(3, weights=weights, temperature=1.0))
    taught(emo)
    support = Batch(randn(2, 5, 1), randn(2, 5, 1, seed=1))
    grads = {name: g.requires_grad_() for name, g in tree(2).items()}
    combined = emo.combine(grads, emo.recall(emo.encode(support)))
    sum(c.square().sum() for c in combined.values()).backward()
    for parameter in encoder.parameters():
        if weights == "uniform":
            assert parameter.grad is None
        else:
            assert parameter.grad.abs().max() > 1e-4


def test_the_outer_loss_can_be_kept_out_of_the_key_network():
    encoder = MeanKey(PairEmbedder(1, 1, generator=generator_for(0, "key"), dim=DIM))
    support = Batch(randn(2, 5, 1), randn(2, 5, 1, seed=1))
    assert build(encoder=encoder).encode(support).requires_grad
    assert not build(encoder=encoder, train_keys=False).encode(support).requires_grad


# -- recall dropout ----------------------------------------------------------------------------------


def test_recall_dropout_is_a_function_of_the_episode_number():
    emo = build(recall_dropout=0.5)
    taught(emo)
    numbers = torch.arange(200)
    whole = emo.recall(randn(200, DIM), index=numbers).active
    taught(emo, seed=6)
    again = torch.cat([emo.recall(randn(50, DIM), index=part).active for part in numbers.split(50)])
    assert torch.equal(whole, again)
    assert 70 < int(whole.sum()) < 130
    other = build(recall_dropout=0.5, seed=1).recall(randn(200, DIM), index=numbers).active
    assert not torch.equal(whole, other)


def test_recall_dropout_is_off_in_eval_mode():
    emo = build(recall_dropout=1.0)
    taught(emo)
    assert not emo.recall(randn(9, DIM)).active.any()
    assert bool(emo.eval().recall(randn(9, DIM)).active.all())


def test_tasks_unlike_those_of_training_are_evaluated_without_recall():
    emo = build(12, recall_step="always", skip_unfamiliar=SkipUnfamiliar(DIM, share=0.9))
    keys = taught(emo, tasks=12)[0]
    strange = torch.cat([keys.mean(0, keepdim=True), 50 + keys[:1]])
    assert bool(emo.recall(strange).active.all())  # training tasks are what it learns from
    recall = emo.eval().recall(strange)
    assert recall.active.tolist() == [True, False]
    assert (recall.weights.sum(1) > 0).tolist() == [True, False]
    grads = tree(2)
    alone = build().combine(grads, build().recall(strange))
    for name, direction in emo.combine(grads, recall).items():
        assert torch.equal(direction[1], alone[name][1])
        assert not torch.equal(direction[0], alone[name][0])
    assert int(emo.skip_unfamiliar.seen) == 12


@pytest.mark.parametrize("aggregator", [Sum(), Mean(2), Mean(2, pad=True)])
def test_tasks_without_recall_go_the_way_of_an_empty_memory(aggregator):
    emo = build(recall_dropout=0.5, recall_step="always", aggregator=aggregator)
    empty = build(aggregator=aggregator)
    taught(emo)
    keys, grads = randn(8, DIM), tree(8)
    recall = emo.recall(keys, index=torch.arange(8))
    assert 0 < int(recall.active.sum()) < 8
    combined = emo.combine(grads, recall)
    alone = empty.combine(grads, empty.recall(keys))
    opening = emo.opening(recall)
    for name in SHAPES:
        off = ~recall.active
        assert torch.equal(combined[name][off], alone[name][off])
        assert not opening[name][off].any()
        assert bool((combined[name] != alone[name]).flatten(1).any(1)[recall.active].all())


def test_tasks_without_recall_touch_nothing():
    emo = build(recall_dropout=1.0)
    taught(emo)
    emo.remember(emo.recall(randn(2, DIM)), tree(2))
    assert not emo.store.ledger.recalls.any()


# -- the control -------------------------------------------------------------------------------------


def test_the_control_stores_random_directions_of_the_same_norms():
    emo = build(control="random_values")
    _, values = taught(emo)
    stored = {name: buffer[:4] for name, buffer in emo.store.values.items()}
    for name, value in values.items():
        assert torch.allclose(
            stored[name].flatten(1).norm(dim=1), value.flatten(1).norm(dim=1), rtol=1e-5
        )
        cosine = nn.functional.cosine_similarity(stored[name].flatten(1), value.flatten(1))
        assert bool((cosine.abs() < 0.999).all())
    again = build(control="random_values")
    taught(again)
    assert digest(again) == digest(emo)
    other = build(control="random_values", seed=1)
    taught(other)
    assert digest(other) != digest(emo)


# -- refusals and evaluation ---------------------------------------------------------------------------


def test_random_directions_of_large_values_are_finite():
    emo = build(control="random_values")
    drawn = emo._controlled({"w": torch.full((2, 3), 1e25)})["w"]
    assert drawn.isfinite().all()
    torch.testing.assert_close(drawn.double().norm(dim=1), torch.full((2,), 3**0.5 * 1e25).double())


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda v: v["head.bias"][1].fill_(math.nan), MemoryWriteError),
        (lambda v: v["conv.weight"][0].fill_(math.inf), MemoryWriteError),
        (lambda v: v.pop("head.bias"), ShapeError),
        (lambda v: v.update({"head.bias": torch.ones(2, 9)}), ShapeError),
    ],
    ids=["nan", "inf", "missing", "shape"],
)
@pytest.mark.parametrize("control", ["none", "random_values"])
def test_a_refused_batch_changes_nothing_not_even_what_it_recalled(spoil, error, control):
    emo = build(control=control)
    taught(emo)
    recall, values = emo.recall(randn(2, DIM)), tree(2)
    spoil(values)
    before = digest(emo)
    with pytest.raises(error):
        emo.remember(recall, values)
    assert digest(emo) == before


def test_a_key_that_is_not_finite_is_refused_before_anything_is_recalled():
    emo = build()
    taught(emo)
    before = digest(emo)
    with pytest.raises(DataError, match="task 0"):
        emo.recall(torch.full((1, DIM), math.nan))
    assert digest(emo) == before


def test_evaluation_leaves_the_state_as_it_was():
    emo = build(recall_step="eval_only", memory_steps="all")
    taught(emo)
    emo.eval()
    before = digest(emo)
    recall, grads = emo.recall(randn(3, DIM)), tree(3)
    emo.opening(recall)
    for step in range(3):
        emo.combine(grads, recall, step=step)
    with pytest.raises(MemoryWriteError, match="eval mode"):
        emo.remember(recall, grads)
    assert digest(emo) == before


# -- saving ------------------------------------------------------------------------------------------


def complete():
    """An EMO with every part that has a state."""
    encoder = MeanKey(PairEmbedder(1, 1, generator=generator_for(0, "key"), dim=DIM))
    return build(
        encoder=encoder,
        aggregator=Gated(tuple(SHAPES)),
        retrieval=Retrieval(None, weights="softmax", null_distance=1.0),
        content="meta",
        skip_unfamiliar=SkipUnfamiliar(DIM),
    )


def test_a_whole_emo_survives_saving_and_loading_bit_for_bit():
    emo, other = complete(), complete()
    taught(emo)
    with torch.no_grad():
        for parameter in emo.parameters():
            parameter.add_(1.0)
    assert len(emo.store) == int(emo.skip_unfamiliar.seen) == 4
    assert digest(other) != digest(emo)
    other.load_state_dict({name: t.clone() for name, t in emo.state_dict().items()})
    assert digest(other) == digest(emo)
    emo.load_state_dict(complete().state_dict())
    assert len(emo.store) == int(emo.skip_unfamiliar.seen) == 0
    assert digest(emo) == digest(complete())


def test_a_loaded_emo_continues_as_the_saved_one_would_have():
    emo, other = build(recall_dropout=0.3), build(recall_dropout=0.3)
    taught(emo)
    other.load_state_dict({name: t.clone() for name, t in emo.state_dict().items()})
    for one in (emo, other):
        taught(one, seed=6)
        taught(one, seed=7)
    assert digest(other) == digest(emo)


def test_a_state_of_another_network_is_refused_and_changes_nothing():
    emo, other = build(), build()
    taught(emo)
    other.remember(other.recall(randn(1, DIM)), {"w": torch.ones(1, 2)})
    before = digest(emo)
    with pytest.raises(CheckpointError, match=r"conv\.weight"):
        emo.load_state_dict(other.state_dict())
    assert digest(emo) == before


# -- open points -------------------------------------------------------------------------------------


def test_recall_dropout_without_episode_numbers_does_not_get_stuck():
    emo = build(2, recall_dropout=0.5)
    emo.remember(emo.recall(torch.eye(DIM)), tree(2))
    active = []
    for _ in range(60):
        recall = emo.recall(torch.eye(DIM)[:1])
        active.append(bool(recall.active[0]))
        emo.remember(recall, tree(1))
    assert 15 < sum(active) < 45


def test_a_refused_load_leaves_the_warm_up_keys_alone():
    emo, other = build(), build(7)
    other.store.warm_keys = torch.ones(5, DIM)
    before = digest(emo)
    with pytest.raises(CheckpointError):
        emo.load_state_dict(other.state_dict())
    assert digest(emo) == before


def test_value_clip_takes_parameters_that_are_one_number():
    emo, grads = build(value_clip=0.5), {"scale": torch.tensor([2.0])}
    emo.remember(emo.recall(randn(1, DIM)), {"scale": torch.tensor([-8.0])})
    assert emo.combine(grads, emo.recall(randn(1, DIM)))["scale"].tolist() == [1.0]


def test_the_control_keeps_the_size_of_parameters_that_are_one_number():
    emo = build(control="random_values")
    emo.remember(emo.recall(randn(3, DIM)), {"scale": torch.tensor([1.0, 2.0, 3.0])})
    assert emo.store.values["scale"][:3].abs().tolist() == pytest.approx([1.0, 2.0, 3.0])


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"content": "frist"},
        {"memory_steps": "last"},
        {"memory_steps": 1.0},
        {"memory_steps": 0.0},
        {"memory_steps": 1},
        {"recall_step": "never"},
        {"head_align": "greedy"},
        {"tensors": "some"},
        {"head_align": "hungarian"},
        {"scope": "domain"},
        {"control": "zeros"},
        {"recall_dropout": 1.5},
        {"recall_dropout": math.nan},
        {"value_clip": -1.0},
        {"rekey_every": 0},
        {"n_way": 0},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options):
    # Where shapes and types are checked at run time, that check may speak first.
    with pytest.raises((ConfigError, TypeCheckError)):
        build(encoder=ByImage(), norm=("conv.weight",), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"head": (), "head_align": "drop"},
        {"tensors": "norm"},
        {"head_align": "hungarian", "n_way": 3},
        {"rekey_every": 3},
        {"encoder": MeanKey(PairEmbedder(1, 1, generator=torch.Generator(), dim=DIM + 1))},
        {"retrieval": Retrieval(min_fill=7)},
        {"scope": "group", "aggregator": Mean(2)},
        {"scope": "group", "retrieval": Retrieval(2, index=RandomIndex())},
    ],
    ids=[
        "no-head",
        "no-norm",
        "no-prototypes",
        "no-encoder",
        "other-dimension",
        "min-fill",
        "group-mean",
        "group-random",
    ],
)
def test_parts_that_do_not_fit_together_are_refused(options):
    with pytest.raises(ConfigError):
        build(**options)


def test_encoding_needs_an_encoder():
    with pytest.raises(ConfigError, match="no key encoder"):
        build().encode(Batch(randn(1, 2, 1), randn(1, 2, 1)))


def test_the_docstring_of_emo_has_an_example():
    assert ">>> emo.remember(recall, grads)" in EMO.__doc__
