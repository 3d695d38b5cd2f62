"""Options become learners: every name is reachable, contradictions are refused."""

import pytest

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.types import TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.inner import RULES
from torchemo.learners.learner import Learner
from torchemo.models import MLP, Conv4

IMAGES = TaskShape("classification", (3, 16, 16), 3, n_shot=5, base_classes=6)
POINTS = TaskShape("regression", (1,), 1, n_shot=5)
NET = Conv4(3, image_size=16, filters=4)


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_can_be_named(name):
    learner = build_learner(Part(name), NET, IMAGES)
    assert isinstance(learner, Learner)
    assert learner.title


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_named(rule):
    learner = build_learner(Part("maml", {"rule": rule, "inner_lr": 0.3}), NET, IMAGES)
    assert type(learner.loop.rule) is RULES[rule]
    assert learner.loop.rule.lr == 0.3


@pytest.mark.parametrize(("loss", "scale"), [("mean", 1), ("sum", 15), ("n_way", 3)])
def test_the_inner_loss_scales_the_steps(loss, scale):
    learner = build_learner(Part("maml", {"inner_loss": loss}), NET, IMAGES)
    assert learner.loop.loss_scale == scale


@pytest.mark.parametrize("name", ["proto-maml", "protonet", "matchingnet", "nearest-mean"])
def test_learners_of_classes_refuse_regression(name):
    with pytest.raises(ConfigError, match="regression"):
        build_learner(Part(name), MLP(1), POINTS)
