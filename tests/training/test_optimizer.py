"""Optimizers of the outer loop: decay, momentum, and what a memory is spared."""

import pytest
import torch

from tests.laws.cases import OFFSETS, make_episode, make_learner, make_memory
from tests.training.test_trainer import trainer
from torchemo.config.run import OuterConfig
from torchemo.core.errors import CheckpointError
from torchemo.training.step import outer_step

MOMENTUM = {"lr": 0.05, "optimizer": "sgd", "momentum": 0.8, "clip": None}


@pytest.mark.parametrize("nesterov", [False, True])
def test_gradient_descent_with_momentum_and_decay_follows_its_formula(nesterov):
    ours = trainer(config=OuterConfig(nesterov=nesterov, weight_decay=0.1, **MOMENTUM))
    theirs = {n: p.detach().clone() for n, p in ours.params.items()}
    speed = {n: torch.zeros_like(p) for n, p in theirs.items()}
    for i in range(3):
        episode = make_episode(i)
        for name, g in outer_step(ours.learner, theirs, episode).gradients.items():
            g = g + 0.1 * theirs[name]
            speed[name] = 0.8 * speed[name] + g
            theirs[name] = theirs[name] - 0.05 * (
                g + 0.8 * speed[name] if nesterov else speed[name]
            )
        ours.step(episode)
    for name, p in theirs.items():
        torch.testing.assert_close(ours.params[name].detach(), p)


def test_decay_beside_adam_is_not_scaled_by_gradients():
    ours = trainer(config=OuterConfig(lr=0.01, weight_decay=0.5, clip=None))
    start = {n: p.detach().clone() for n, p in ours.params.items()}
    episode = make_episode(0)
    pulls = outer_step(ours.learner, start, episode).gradients
    ours.step(episode)
    for name, p in start.items():
        # Adam's first step is the rate along the sign of the gradient.
        own = pulls[name] / (pulls[name].abs() + 1e-8)
        expected = p * (1 - 0.01 * 0.5) - 0.01 * own
        torch.testing.assert_close(ours.params[name].detach(), expected)


def test_a_memory_does_not_decay():
    learner = make_learner("maml")
    for case in ("gated", OFFSETS):
        made = trainer(memory=make_memory(case, learner), config=OuterConfig(weight_decay=0.5))
        slots = {id(p) for p in made.memory_learned.values()}
        assert slots
        for group in made.optimizer.param_groups:
            mine = {id(p) for p in group["params"]} & slots
            assert group["weight_decay"] == (0.0 if mine else 0.5)


def test_momentum_is_saved_and_not_taken_for_that_of_another_optimizer():
    made, other = (trainer(config=OuterConfig(**MOMENTUM)) for _ in range(2))
    for i in range(2):
        made.step(make_episode(i))
    state = made.state_dict()
    other.load_state_dict(state)
    for one in (made, other):
        one.step(make_episode(3))
    assert all(torch.equal(p, other.params[n]) for n, p in made.params.items())
    with pytest.raises(CheckpointError, match="saved optimizer"):
        trainer().load_state_dict(state)
