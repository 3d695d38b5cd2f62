import pytest
import torch
from torch import nn

from tests.interop.problem import KEY_DIM, encoder, network
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.interop import for_module
from torchemo.memory.aggregators import AGGREGATORS, Mean, Sum
from torchemo.memory.controllers import CONTROLLERS, FIFO

DEFAULTS = {
    "content": "first",
    "memory_steps": "first",
    "recall_step": "off",
    "head_align": "none",
    "tensors": "all",
    "n_way": None,
    "recall_dropout": 0.0,
    "value_clip": None,
    "value_scale": 1.0,
    "rekey_every": None,
    "train_keys": True,
    "control": "none",
    "scope": "shared",
    "seed": 0,
}


def choices_of(emo):
    return {name: getattr(emo, name) for name in DEFAULTS}


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_aggregator_goes_through_the_three_verbs_and_keeps_the_type(aggregator, dtype):
    net = network().to(dtype)
    head = ("2.weight", "2.bias")
    emo = for_module(net, k=2, capacity=3, aggregator=aggregator, key_dim=2, head=head)
    grads = {n: torch.ones(2, *p.shape, dtype=dtype) for n, p in net.named_parameters()}
    for _ in range(2):
        recall = emo.recall(torch.eye(2, dtype=dtype))
        combined = emo.combine(grads, recall)
        assert {n: c.shape for n, c in combined.items()} == {n: g.shape for n, g in grads.items()}
        assert all(c.dtype == dtype for c in combined.values())
        emo.remember(recall, emo.value((grads,)))
    assert recall.m == 2
    assert isinstance(emo.aggregator, AGGREGATORS[aggregator])


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_the_controller_is_the_one_that_was_named(controller):
    emo = for_module(network(), k=1, capacity=1, key_dim=1, controller=controller)
    assert isinstance(emo.store.controller, CONTROLLERS[controller])


def test_parts_made_elsewhere_are_used_as_they_are():
    mean, fifo, keys = Mean(7, pad=True), FIFO(), encoder()
    emo = for_module(
        network(), k=7, capacity=9, aggregator=mean, controller=fifo, encoder=keys, content="last"
    )
    assert (emo.aggregator, emo.store.controller) == (mean, fifo)
    assert choices_of(emo) == {**DEFAULTS, "content": "last"}
    assert emo.encoder is keys
    assert (emo.store.key_dim, emo.store.capacity, emo.retrieval.k) == (KEY_DIM, 9, 7)


def test_the_default_is_sum_with_the_default_choices():
    emo = for_module(network(), k=1, capacity=1, key_dim=1)
    assert isinstance(emo.aggregator, Sum)
    assert choices_of(emo) == DEFAULTS


def test_frozen_parameters_are_not_remembered():
    net = network()
    net[0].requires_grad_(False)
    emo = for_module(net, k=1, capacity=1, aggregator="gated", key_dim=1)
    assert emo.aggregator.names == ("2.weight", "2.bias")


def test_building_leaves_the_module_and_the_global_random_state_alone():
    net = network()
    before = {n: p.clone() for n, p in net.named_parameters()}
    state = torch.random.get_rng_state()
    made = [
        for_module(net, k=1, capacity=1, aggregator=a, key_dim=1).aggregator.state_dict()
        for a in ("gate", "gate", "coordinate")
    ]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    assert all(torch.equal(made[0][n], made[1][n]) for n in made[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"aggregator": "median"}, r"no aggregator 'median'\.\n.*There are: .*gated, mean, sum"),
        ({"controller": "lfu"}, r"no controller 'lfu'\.\n.*There are: clock, fifo, lru"),
        ({"key_dim": None}, "dimension of the task keys is unknown"),
        ({"encoder": encoder()}, "keys of dimension 4,(.|\n)*dimension 2"),
        ({"head": ("2",)}, r"head tensors \['2'\] are not among .*'2.weight'"),
        ({"k": 0}, "k should be 1 or more"),
        ({"capacity": -1}, "capacity should be 0"),
    ],
)
def test_what_cannot_work_is_refused_by_name(wrong, message):
    with pytest.raises(ConfigError, match=message):
        for_module(network(), **{"k": 1, "capacity": 1, "key_dim": 2, **wrong})


def test_a_module_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="no trainable parameter"):
        for_module(nn.Tanh(), k=1, capacity=1, key_dim=1)


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"0.weights": torch.zeros(1, 2, 3)}, "no trainable parameter '0.weights'"),
        ({"0.weight": torch.zeros(2, 3)}, r"should have the shape \[1, 2, 3\].*got \[2, 3\]"),
        ({"0.weight": torch.zeros(4, 2, 3)}, r"should have the shape \[1, 2, 3\]"),
    ],
)
def test_gradients_that_do_not_fit_the_module_are_refused(grads, message):
    emo = for_module(nn.Sequential(nn.Linear(3, 2)), k=1, capacity=2, key_dim=2)
    recall = emo.recall(torch.zeros(1, 2))
    with pytest.raises(ShapeError, match=message):
        emo.combine(grads, recall)
