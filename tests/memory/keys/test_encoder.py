"""Task keys: what every key network obeys, and what it refuses."""

import pytest
import torch

from tests.memory.keys.cases import EMBEDDERS, build, choose, data_for, images, pairs, theta
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch
from torchemo.memory.aggregators.gate import GateOptions
from torchemo.memory.keys import KEYS
from torchemo.memory.keys.embedders import PairEmbedder
from torchemo.memory.keys.encoder import KeyEncoder, LearnerKey
from torchemo.memory.keys.statistics import StatisticsKey, StatisticsNetwork
from torchemo.memory.keys.transformer import MeanKey, TransformerKey, TransformerKeyOptions

CASES = [(e, n) for e in ("transformer", "mean") for n in EMBEDDERS]
CASES += [(e, n) for e in ("statistics", "learned-statistics") for n in ("own", "pairs")]
ENCODERS = sorted({encoder for encoder, _ in CASES})
every_encoder = pytest.mark.parametrize(("encoder", "name"), CASES)


def test_the_registry_names_every_key():
    assert {
        "transformer": TransformerKey,
        "mean": MeanKey,
        "statistics": StatisticsKey,
        "learned-statistics": StatisticsNetwork,
        "learner": LearnerKey,
    } == KEYS
    assert set(ENCODERS) == set(KEYS) - {"learner"}  # and all of them obey the laws below


# --- laws of every encoder ---------------------------------------------------------------------


@every_encoder
def test_a_key_does_not_depend_on_the_order_of_the_support_set(encoder, name):
    keys, support = build(encoder, name), data_for(name)
    order = torch.randperm(support.x.shape[1], generator=generator_for(1))
    moved = keys(choose(support, order), theta())
    assert (moved - keys(support, theta())).abs().max() < 1e-10


@every_encoder
def test_a_batch_of_tasks_gives_the_keys_of_a_loop_over_tasks(encoder, name):
    keys, support = build(encoder, name), data_for(name)
    alone = [keys(Batch(x[None], y[None]), theta()) for x, y in zip(*support, strict=True)]
    torch.testing.assert_close(keys(support, theta()), torch.cat(alone), rtol=0, atol=1e-12)


@every_encoder
def test_encoders_satisfy_the_protocol_and_tell_their_width(encoder, name):
    keys, support = build(encoder, name), data_for(name)
    assert isinstance(keys, KeyEncoder)
    assert keys(support, theta()).shape == (3, keys.dim)
    assert keys.embed(support, theta()).shape[:2] == support.x.shape[:2]


@every_encoder
def test_different_tasks_have_different_keys(encoder, name):
    keys = build(encoder, name)(data_for(name), theta())
    assert torch.cdist(keys, keys)[0, 1:].min() > 1e-6


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_support_set_that_is_not_finite_is_refused_with_its_task(encoder, bad):
    support = images()
    support.x[1, 2, 0, 3, 3] = bad
    with pytest.raises(DataError, match="support set of task 1"):
        build(encoder, "own")(support)


def test_targets_that_are_not_finite_are_refused_too():
    support = pairs()
    support.y[2, 0] = float("nan")
    with pytest.raises(DataError, match="support set of task 2"):
        build("mean", "pairs")(support)


def test_a_key_that_is_not_finite_is_refused_with_its_task():
    encoder, support = (
        MeanKey(PairEmbedder(2, 1, generator=generator_for(0), dim=4)).double(),
        pairs(),
    )
    torch.nn.init.zeros_(encoder.embedder.linear.bias)
    support.x[1], support.y[1] = 0, 0
    with pytest.raises(DataError, match="key of task 1"):
        encoder(support)


@pytest.mark.parametrize("name", ["dim", "layers", "heads", "ff"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_key_network_of_no_size_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"memory\.key\.{name} should be 1 or more, got {value}"):
        TransformerKeyOptions(**{name: value})


def test_a_key_network_deeper_than_memory_holds_is_refused_before_it_is_built():
    with pytest.raises(ConfigError, match=r"memory\.key\.layers should be 1000 or less"):
        TransformerKeyOptions(layers=1_000_000)
    with pytest.raises(ConfigError, match=r"memory\.aggregator\.layers should be 1000 or less"):
        GateOptions(layers=1_000_000)
