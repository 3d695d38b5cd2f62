"""Losses and scores per task, against loops over numbers."""

import math

import pytest
import torch

from torchemo.core.errors import DataError, ShapeError
from torchemo.core.losses import accuracy, check_labels, cross_entropy, mean_squared_error
from torchemo.core.rng import generator_for

TASKS, N, WAY = 3, 4, 5


def logits(seed=0):
    return torch.randn(TASKS, N, WAY, generator=generator_for(seed, "out"), dtype=torch.float64)


def labels(seed=0):
    return torch.randint(WAY, (TASKS, N), generator=generator_for(seed, "y"))


def test_cross_entropy_is_the_mean_log_loss_of_each_task():
    out, y = logits(), labels()
    found = cross_entropy(out, y)
    for b in range(TASKS):
        losses = []
        for scores, label in zip(out[b].tolist(), y[b].tolist(), strict=True):
            losses.append(math.log(sum(math.exp(s) for s in scores)) - scores[label])
        assert found[b].item() == pytest.approx(sum(losses) / N, rel=1e-13)


def test_uniform_predictions_cost_the_logarithm_of_the_number_of_classes():
    found = cross_entropy(torch.zeros(TASKS, N, WAY), labels())
    assert found.tolist() == pytest.approx([math.log(WAY)] * TASKS)


def test_cross_entropy_takes_labels_that_are_not_contiguous():
    y = labels()
    spread = torch.stack([y, y], -1)[..., 0]
    assert not spread.is_contiguous()
    assert torch.equal(cross_entropy(logits(), spread), cross_entropy(logits(), y))


def test_mean_squared_error_is_averaged_over_examples_and_outputs():
    out, y = logits(), logits(1)
    found = mean_squared_error(out, y)
    for b in range(TASKS):
        a, c = out[b].flatten().tolist(), y[b].flatten().tolist()
        expected = sum((p - q) ** 2 for p, q in zip(a, c, strict=True)) / len(a)
        assert found[b].item() == pytest.approx(expected, rel=1e-13)


def test_targets_that_would_broadcast_are_refused():
    with pytest.raises(ShapeError, match=r"\[3, 4, 1\], got \[3, 4\]"):
        mean_squared_error(torch.zeros(3, 4, 1), torch.zeros(3, 4))


@pytest.mark.parametrize("loss", [cross_entropy, mean_squared_error])
def test_a_task_does_not_feel_the_others(loss):
    out, y = logits().requires_grad_(), labels()
    target = y if loss is cross_entropy else logits(1)
    gradient = torch.autograd.grad(loss(out, target)[1], out)[0]
    assert not gradient[[0, 2]].any()
    assert bool(gradient[1].any())


def test_accuracy_is_the_share_of_right_answers():
    out = torch.tensor([[[1.0, 2.0], [2.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    assert accuracy(out, torch.tensor([[1, 1], [1, 1]])).tolist() == [0.5, 1.0]


def test_labels_in_range_pass():
    check_labels(torch.tensor([[0, 1], [4, 0]]), 5, what="labels")


@pytest.mark.parametrize("bad", [-1, 5])
def test_labels_out_of_range_name_their_task(bad):
    y = torch.tensor([[0, 1], [4, bad]])
    with pytest.raises(DataError, match=r"support labels of task 1: labels should lie in 0\.\.4"):
        check_labels(y, 5, what="support labels")
