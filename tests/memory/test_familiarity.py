"""Familiarity: against a loop that leaves out one key at a time, and what it changes of a recall."""

import copy

import numpy as np
import pytest
import torch

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.memory.familiarity import RIDGE, Familiarity, _left_out

DIM = 6


def keys(n, seed, *, scale=1.0):
    """Draw keys that differ in two of six dimensions and hardly in the others, on the unit sphere."""
    g = generator_for(seed, "keys")
    drawn = torch.randn(n, DIM, generator=g, dtype=torch.float64)
    drawn *= torch.tensor([1.0, 1.0, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64) * scale
    drawn = drawn + torch.tensor([3.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    return (drawn / drawn.norm(dim=1, keepdim=True)).float()


def after(seen, *, share=0.9, window=None):
    made = Familiarity(DIM, share=share, window=window)
    for part in seen.split(5):
        made.see(part)
    return made


def squared(key, others, ridge):
    """Return the Mahalanobis distance of one key to the others, by the textbook."""
    centre, spread = others.mean(0), np.cov(others.T) + ridge * np.eye(DIM)
    return float((key - centre) @ np.linalg.inv(spread) @ (key - centre))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_the_verdict_is_that_of_a_loop_which_leaves_out_one_key_at_a_time(share):
    seen, fresh = keys(48, 0), keys(200, 1, scale=1.5)
    made = after(seen, share=share)
    kept = made.keys.double().numpy()
    ridge = RIDGE * np.cov(kept.T).diagonal().mean()
    own = [squared(kept[i], np.delete(kept, i, 0), ridge) for i in range(len(kept))]
    limit = np.quantile(own, share)
    expected = [squared(key, kept, ridge) <= limit for key in fresh.double().numpy()]
    assert made(fresh).tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_distances_to_all_others_are_those_of_the_loop():
    kept = keys(30, 0).double()
    away, covariance = kept - kept.mean(0), torch.cov(kept.T)
    got = _left_out(away, covariance, 0.3 * torch.eye(DIM, dtype=torch.float64))
    others = [np.delete(kept.numpy(), i, 0) for i in range(30)]
    expected = [squared(kept[i].numpy(), others[i], 0.3) for i in range(30)]
    assert got.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_about_this_share_of_unseen_tasks_of_the_same_kind_is_familiar(share):
    made = after(keys(400, 0), share=share, window=400)
    assert float(made(keys(4000, 1)).double().mean()) == pytest.approx(share, abs=0.04)


def test_a_key_is_strange_when_it_leaves_the_dimensions_of_training_though_slots_are_near():
    seen = keys(48, 0)
    made = after(seen)
    strange = seen[:1].clone()
    strange[0, 4] += 0.15  # less than what keys of training are apart
    assert float((seen - seen.mean(0)).norm(dim=1).median()) > 0.15
    assert made(torch.cat([seen.mean(0, keepdim=True), strange])).tolist() == [True, False]


def test_all_tasks_are_familiar_until_enough_were_seen():
    far = 100 * torch.ones(1, DIM)
    assert after(keys(2 * DIM - 1, 0))(far).tolist() == [True]
    assert after(keys(2 * DIM, 0))(far).tolist() == [False]


def test_the_last_keys_are_kept_whatever_the_batches():
    seen = keys(70, 0)
    small, large = Familiarity(DIM, window=24), Familiarity(DIM, window=24)
    for part in seen.split(4):
        small.see(part)
    large.see(seen)
    for made in (small, large):
        assert {tuple(k.tolist()) for k in made.keys} == {tuple(k.tolist()) for k in seen[-24:]}
    assert torch.equal(small.keys, large.keys)


def test_a_saved_state_judges_the_same():
    made, fresh = after(keys(40, 0)), keys(50, 1, scale=2.0)
    other = Familiarity(DIM, share=0.9)
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    assert torch.equal(other(fresh), made(fresh))
    for one in (made, other):
        one.see(keys(20, 2))
    assert torch.equal(other.keys, made.keys)


def test_judging_changes_nothing():
    made = after(keys(40, 0))
    before = copy.deepcopy(made.state_dict())
    made(keys(9, 1))
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())


def test_keys_without_any_spread_are_no_reason_to_fail():
    made = after(torch.ones(30, DIM))
    assert made(torch.ones(1, DIM)).tolist() == [True]


@pytest.mark.parametrize("options", [{"share": 0.0}, {"share": 1.0}, {"window": 2 * DIM - 1}])
def test_what_cannot_be_judged_by_is_refused(options):
    with pytest.raises(ConfigError, match="familiarity"):
        Familiarity(DIM, **options)
