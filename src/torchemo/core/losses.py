"""Per-task losses and scores: everything returns one number per task, ``[B]``."""

import torch.nn.functional as F
from torch import Tensor

from torchemo.core.errors import DataError, ShapeError


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of each task: logits ``[B, n, n_way]``, labels ``[B, n]`` -> ``[B]``."""
    per_example = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
    return per_example.view(y.shape).mean(1)


def balanced_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Mean over classes of the mean cross-entropy of their examples, for each task: ``[B]``.

    A class with many examples weighs as much as one with few; classes without any do not count.
    """
    member = F.one_hot(y.long(), out.shape[-1]).to(out.dtype)
    count = member.sum(1)
    share = (member / count.clamp(min=1).unsqueeze(1)).sum(2) / (count > 0).sum(1, keepdim=True)
    per_example = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
    return (share * per_example.view(y.shape)).sum(1)


def smoothed_cross_entropy(out: Tensor, y: Tensor, *, smoothing: float) -> Tensor:
    """Mean cross-entropy of each task with targets ``1 - epsilon``, and ``epsilon / (N - 1)`` elsewhere."""
    # Torch spreads its share over all N classes, the right one included.
    classes = out.shape[-1]
    share = smoothing * classes / (classes - 1)
    per_example = F.cross_entropy(
        out.flatten(0, 1), y.flatten(), reduction="none", label_smoothing=share
    )
    return per_example.view(y.shape).mean(1)


def mean_squared_error(out: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of each task: ``[B, n, n_out]`` against the same shape -> ``[B]``."""
    if out.shape != y.shape:
        raise ShapeError(
            f"targets should have the shape of the outputs {list(out.shape)}, got {list(y.shape)}."
        )
    return (out - y).square().flatten(1).mean(1)


def task_loss(out: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each task: cross-entropy for labels, mean squared error for other targets."""
    return mean_squared_error(out, y) if y.is_floating_point() else cross_entropy(out, y)


def accuracy(out: Tensor, y: Tensor) -> Tensor:
    """Share of right answers of each task: logits ``[B, n, n_way]``, labels ``[B, n]`` -> ``[B]``."""
    return (out.argmax(-1) == y).to(out.dtype).mean(1)


def check_labels(y: Tensor, n_way: int, *, what: str) -> None:
    """Raise `DataError` naming the task whose labels are not in ``0 .. n_way - 1``."""
    bad = ((y < 0) | (y >= n_way)).flatten(1).any(1)
    if bad.any():
        b = int(bad.nonzero()[0])
        raise DataError(
            f"{what} of task {b}: labels should lie in 0..{n_way - 1},"
            f" got {int(y[b].min())}..{int(y[b].max())}.",
            hint="Relabel the classes of every task to 0..n_way-1, or use a head with more outputs.",
        )
