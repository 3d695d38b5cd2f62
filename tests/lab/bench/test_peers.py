"""Everybody computes the same: the peers' steps and ours are one gradient."""

import sys
from types import ModuleType

import pytest
import torch

from tests.interop.learn2learn_stand_in import MAML as Wrapper
from tests.interop.learn2learn_stand_in import maml_update
from torchemo.lab.bench.measures import peers
from torchemo.lab.bench.measures.step import CHECKED, agreement, our_step
from torchemo.lab.bench.measures.work import Work


@pytest.mark.parametrize(
    ("learner", "order", "names"),
    [
        ("maml", 2, {"plain loop", "plain loop, channels last", "higher", "TorchOpt"}),
        ("maml", 1, {"plain loop", "plain loop, channels last", "higher"}),
        ("anil", 2, {"plain loop", "plain loop, channels last"}),
        ("anil", 1, {"plain loop", "plain loop, channels last"}),
    ],
)
def test_ours_and_the_peers_give_the_same_gradient(learner, order, names):
    found = agreement(Work(learner=learner, order=order))
    assert names <= found.keys()
    assert {"torchemo, fused", "torchemo, reference"} < found.keys()
    assert max(found.values()) < 1e-12, found


def test_a_peer_that_computes_something_else_is_noticed(monkeypatch):
    real = peers.with_higher
    monkeypatch.setattr(
        peers, "with_higher", lambda net, episode, work: real(net, episode, work.but(rate=0.06))
    )
    assert agreement(Work())["higher"] > 1e-4


class LearnToLearn(Wrapper):
    """The stand-in with learn2learn's own update."""

    def __init__(self, model, lr, first_order=False):
        super().__init__(model, lr)
        self.first_order = first_order

    def clone(self):
        return LearnToLearn(super().clone().module, self.lr, self.first_order)

    def adapt(self, loss):
        tensors = list(self.module.parameters())
        found = torch.autograd.grad(loss, tensors, create_graph=not self.first_order)
        maml_update(self.module, self.lr, found)


@pytest.mark.parametrize("order", [1, 2])
def test_learn2learn_is_used_as_its_wrapper_is_meant(monkeypatch, order):
    module = ModuleType("learn2learn")
    module.algorithms = ModuleType("algorithms")
    module.algorithms.MAML = LearnToLearn
    monkeypatch.setitem(sys.modules, "learn2learn", module)
    work = Work(order=order).but(**CHECKED)
    params = work.params(torch.float64)
    net = peers.make_module(work, params)
    theirs = peers.with_learn2learn(net, work.episode(torch.float64), work)()
    ours = our_step(work, "reference", dtype=torch.float64)()
    for a, b in zip(theirs, ours, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_peers_that_are_not_installed_are_left_out_with_a_note(monkeypatch):
    monkeypatch.setattr(peers.util, "find_spec", lambda name: None)
    assert peers.installed() == {}
    assert set(peers.missing().values()) == {"not installed"}
    assert set(peers.peer_makers(Work())) == {"plain loop", "plain loop, channels last"}
