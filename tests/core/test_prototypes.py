"""Class means against a loop over classes and examples."""

import pytest
import torch

from torchemo.core.errors import DataError
from torchemo.core.prototypes import class_means
from torchemo.core.rng import generator_for


def test_class_means_are_those_of_a_loop_over_classes():
    g = generator_for(0)
    embedded = torch.randn(3, 8, 4, generator=g, dtype=torch.float64)
    y = torch.stack(
        [torch.tensor([0, 1, 2, 2, 1, 0, 2, 2])[torch.randperm(8, generator=g)] for _ in range(3)]
    )
    got = class_means(embedded, y, n_way=3)
    assert got.shape == (3, 3, 4)
    for b in range(3):
        for c in range(3):
            members = [e for e, label in zip(embedded[b], y[b], strict=True) if label == c]
            torch.testing.assert_close(got[b, c], sum(members) / len(members))


def test_a_single_example_is_its_class_mean_and_gradients_pass():
    embedded = torch.eye(3)[None].clone().requires_grad_()
    means = class_means(embedded, torch.tensor([[2, 0, 1]]), n_way=3)
    assert torch.equal(means, embedded[:, [1, 2, 0]])
    means[0, 2].sum().backward()
    assert embedded.grad[0].sum(1).tolist() == [3, 0, 0]


def test_prototypes_refuse_a_class_without_examples():
    with pytest.raises(DataError, match=r"task 1: class 2"):
        class_means(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [0, 1, 1]]), n_way=3)


def test_labels_outside_the_classes_are_refused():
    with pytest.raises(DataError, match="support labels"):
        class_means(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]), n_way=3)
