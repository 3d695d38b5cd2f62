"""Train a network to tell all base classes apart, with an optimizer of its own."""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from torchemo.config.run import DenseConfig
from torchemo.core.errors import CheckpointError, ConfigError, Diverged
from torchemo.core.losses import smoothed_cross_entropy
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Model, Params
from torchemo.learners.dense import TakesDense, dense_logits
from torchemo.learners.learner import Learner
from torchemo.models.layers import kaiming_normal, zeros
from torchemo.models.norm import update_running
from torchemo.models.trunk import Trunk, feature_count
from torchemo.training.optimizer import make_optimizer, optimizer_state, restore_optimizer

_OPTIMIZER = "optimizer."
"""Prefix of the optimizer's tensors in a saved state."""


@final
class DenseTraining:
    """Train a network on base classes, with an optimizer of its own that moves the network in place.

    Args:
        model: The network.
        params: Meta-parameters of the learner, among them the network's.
        config: The classifier and its optimizer.
        classes: Number of base classes.
        seed: Seed of the classifier's weights.
    """

    def __init__(
        self, model: Model, params: Params, config: DenseConfig, *, classes: int, seed: int
    ) -> None:
        if classes < 2:
            raise ConfigError(
                f"train.dense classifies the classes of the training split, these tasks have {classes}.",
                hint="Use image sets, or leave train.dense.steps and train.dense.share at 0.",
            )
        self.model, self.params, self.config = model, params, config
        names = Trunk(model).init(torch.Generator()).keys() - set(model.buffers)
        self.names = [name for name in params if name in names]
        device = next(iter(params.values())).device
        generator = generator_for(seed, "dense classifier")
        shape = (classes, feature_count(model))
        drawn = {"weight": kaiming_normal(shape, generator)}
        drawn |= (
            {"scale": torch.tensor(config.scale, device=generator.device)}
            if config.classifier == "cosine"
            else {"bias": zeros((classes,), generator)}
        )
        self.classifier = {n: t.to(device).requires_grad_() for n, t in drawn.items()}
        moved = [*(params[n] for n in self.names), *self.classifier.values()]
        self.optimizer = make_optimizer([{"params": moved, "lr": config.lr}], config)

    def loss(self, params: Params, batch: Batch, seen: Params | None = None) -> Tensor:
        """Return the mean cross-entropy over all base classes, on the graph.

        Args:
            params: The network's tensors, without a task axis.
            batch: Images ``x [1, n, ...]`` and base classes ``y [1, n]``.
            seen: Where the network puts the statistics of the batch, if it averages them.
        """
        network = self.model.at(0, sink=seen)
        z = network.features({n: p.unsqueeze(0) for n, p in params.items()}, batch.x)
        logits = dense_logits(self.classifier, z[0])
        return smoothed_cross_entropy(logits[None], batch.y, smoothing=self.config.smoothing)[0]

    def step(self, batch: Batch, *, rate_factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Take one step; return the loss it had before and the norm of its gradient.

        Raises:
            Diverged: The loss or the gradient is not finite; nothing has been changed.
        """
        seen: Params = {}
        network = {n: p for n, p in self.params.items() if "/" not in n}
        moved = [*(self.params[n] for n in self.names), *self.classifier.values()]
        loss = self.loss(network, batch, seen if self.model.buffers else None)
        gradients = torch.autograd.grad(loss, moved)
        for tensor, gradient in zip(moved, gradients, strict=True):
            tensor.grad = gradient
        limit = math.inf if self.config.clip is None else self.config.clip
        norm = torch.nn.utils.clip_grad_norm_(moved, limit)
        if bool((loss + norm).isfinite()):
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.lr * rate_factor
            self.optimizer.step()
            self._average(seen)
        for tensor in moved:
            tensor.grad = None
        if not bool((loss + norm).isfinite()):
            raise Diverged(
                "dense classification has a non-finite loss or gradient.",
                hint="Lower train.dense.lr; nothing was changed by this step.",
            )
        return loss.detach(), norm.detach()

    def _average(self, seen: Params) -> None:
        """Move running statistics; where they are kept for every inner step, all of them."""
        buffers = {n: self.params[n] for n in seen}
        rows = max((b.shape[0] if b.ndim == 2 else 1 for b in buffers.values()), default=0)
        for step in range(rows):
            buffers = update_running(buffers, {n: s.detach() for n, s in seen.items()}, step=step)
        for name, buffer in buffers.items():
            self.params[name].data.copy_(buffer)

    def state_dict(self) -> Params:
        """Return the classifier and the state of the optimizer."""
        moments = {_OPTIMIZER + n: t for n, t in optimizer_state(self.optimizer).items()}
        return {**self.classifier, **moments}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved state."""
        self.begin_with(classifier_of(state))
        moments = {
            n.removeprefix(_OPTIMIZER): t for n, t in state.items() if n.startswith(_OPTIMIZER)
        }
        restore_optimizer(self.optimizer, moments, gone=range(0))

    def begin_with(self, classifier: Params) -> None:
        """Take over a saved classifier of the same base classes.

        Raises:
            CheckpointError: It is another one.
        """
        due = {n: list(t.shape) for n, t in self.classifier.items()}
        got = {n: list(t.shape) for n, t in classifier.items()}
        if due != got:
            raise CheckpointError(
                f"the saved dense classifier has {got}, this run has {due}.",
                hint="Use the same classes, network and train.dense.classifier.",
            )
        for name, tensor in self.classifier.items():
            tensor.data.copy_(classifier[name])


def dense_training(
    model: Model, params: Params, config: DenseConfig | None, *, stage: int, classes: int, seed: int
) -> DenseTraining | None:
    """Return what trains on base classes; None if there is no stage of it and no step beside episodes."""
    if config is None or not (stage or config.share):
        return None
    return DenseTraining(model, params, config, classes=classes, seed=seed)


def classifier_of(state: Mapping[str, Tensor]) -> Params:
    """Return the classifier in a saved state of `DenseTraining`."""
    return {n: t for n, t in state.items() if not n.startswith(_OPTIMIZER)}


def hand_over(learner: Learner, params: Params, classifier: Params) -> None:
    """Give a learner the classifier of base classes, where it takes one over."""
    if isinstance(learner, TakesDense):
        for name, tensor in learner.after_dense(params, classifier).items():
            params[name].data.copy_(tensor)


def begin_with(params: Params, saved: Mapping[str, Tensor], *, where: str) -> None:
    """Begin with the network of another run, as far as it has tensors of the same names.

    Raises:
        ConfigError: It has none of them, or one of another shape.
    """
    shared = [n for n in params if "/" not in n and n in saved]
    for name in shared:
        if params[name].shape != saved[name].shape:
            raise ConfigError(
                f"train.start_from: '{name}' is {list(saved[name].shape)} in {where} and"
                f" {list(params[name].shape)} here.",
                hint="Use the same model options, image size and number of classes as that run.",
            )
    if not shared:
        raise ConfigError(
            f"train.start_from: the network of {where} has no tensor of this one.",
            hint="Use the same model as that run.",
        )
    for name in shared:
        params[name].data.copy_(saved[name])
