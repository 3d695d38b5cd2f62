"""Meta-SGD: learning to learn quickly (Li, Zhou, Chen, Li, 2017), with EMO's memory of its rates (A18)."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch

from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.base import GradientLearner, How
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.learner import Fitted, Traits
from torchemo.memory.bound import BoundMemory

RATE = "rate/"
"""Prefix of a tensor's inner rate among the meta-parameters and among the remembered values."""


@final
@dataclass(frozen=True)
class MetaSGDOptions(LoopOptions):
    """Options of Meta-SGD; the inner rate is learned and ``inner_lr`` is not used."""

    rate_shape: Literal["per_element", "per_tensor", "scalar"] = "per_element"
    """One rate per element, per tensor, or for all tensors."""
    rate_init: tuple[float, float] = (0.005, 0.1)
    """Rates are drawn uniformly from this interval."""
    rate_memory: float = 0.0
    """Rate of EMO's memory of rate gradients (A18); 0 switches it off, 0.001 is its preset."""


@final
@dataclass(frozen=True)
class MetaSGD(GradientLearner):
    """Learn the inner rates with the initialisation: ``theta' = theta - alpha o g`` (o: element-wise).

    The outer gradient in alpha after one step is ``-g o grad L_Q(theta')``. Rates may become negative.

    Choice: inner rates do not move in Meta-SGD's inner loop, so the gradients the paper stores for them are
    taken as h = dL_S(theta_1)/dalpha = -g_0 o grad L_S(theta_1), and a task with recalled rate gradients H
    uses ``alpha - eta_alpha Aggr(h, H)``, where eta_alpha is ``rate_memory``.

    Args:
        loop: The inner loop; the rule's own rate is not used.
        rate_shape: A rate ``per_element`` (the paper), ``per_tensor``, or one ``scalar`` for all.
        rate_init: See `MetaSGDOptions`; equal ends are a constant.
        rate_memory: See `MetaSGDOptions`.
    """

    title: ClassVar[str] = "Meta-SGD"
    Options: ClassVar[type[LoopOptions]] = MetaSGDOptions

    rate_shape: Literal["per_element", "per_tensor", "scalar"] = "per_element"
    rate_init: tuple[float, float] = (0.005, 0.1)
    rate_memory: float = 0.0

    def __post_init__(self) -> None:
        if self.rate_memory < 0:
            raise ConfigError(f"rate_memory should be 0 (off) or more, got {self.rate_memory}.")
        if self.rate_memory and self.rate_shape != "per_element":
            raise ConfigError("the memory of rates needs a rate per element.")

    @property
    def traits(self) -> Traits:
        """Rates per element tell classes apart, so only shared rates leave labels exchangeable."""
        return super().traits._replace(label_equivariant=self.rate_shape != "per_element")

    def init(self, generator: torch.Generator) -> Params:
        """Draw the network's parameters and the rates of its adapted tensors."""
        theta = self.loop.model.init(generator)
        names = self.loop.names(theta)
        low, high = self.rate_init
        if self.rate_shape == "scalar":
            shapes: dict[str, torch.Size] = {"all": torch.Size(())}
        elif self.rate_shape == "per_tensor":
            shapes = {name: torch.Size(()) for name in names}
        else:
            shapes = {name: theta[name].shape for name in names}
        rates = {
            RATE + name: low + (high - low) * torch.rand(shape, generator=generator)
            for name, shape in shapes.items()
        }
        return {**theta, **rates}

    def per_class(self, params: Params) -> list[str]:
        """Return the names of the head's tensors and, with a rate per element, of their rates."""
        own = super().per_class(params)
        return own + ([RATE + n for n in own] if self.rate_shape == "per_element" else [])

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at ``theta`` with the learned rates."""
        tasks = support.x.shape[0]
        rates = {}
        for name in self.loop.names(base):
            rate = params[RATE + ("all" if self.rate_shape == "scalar" else name)]
            full = (
                rate
                if self.rate_shape == "per_element"
                else rate.view((1,) * (base[name].dim() - 1))
            )
            rates[name] = full.expand(tasks, 1, *full.shape)
        return Start(base, rates)

    def inner(self, start: Start, support: Batch, how: How) -> Fitted:
        """Take steps with the learned rates; with a rate memory, move the rates first."""
        if not self.rate_memory:
            return super().inner(start, support, how)
        h = self._rate_gradients(start, support, how.order)
        moved = self._recalled_rates(start, h, how.memory)
        return super().inner(moved, support, how)._replace(extra_values=h)

    def remembered(self, content: str) -> dict[str, torch.Size]:
        """Return what a memory holds for a task: gradients of tensors, and of their rates if kept."""
        theta = self.model.init(torch.Generator())
        shapes = {n: theta[n].shape for n in self.loop.names(theta)}
        if content == "meta":
            fixed = self.model.buffers
            shapes = {n: p.shape for n, p in theta.items() if n not in fixed}
        if content == "meta" and self.rate_memory:
            raise ConfigError(
                "outer gradients say nothing about inner rates: rate_memory needs support gradients.",
                hint="Set learner.rate_memory to 0, or memory.content to first.",
            )
        return shapes | ({RATE + n: s for n, s in shapes.items()} if self.rate_memory else {})

    def _rate_gradients(self, start: Start, support: Batch, order: int) -> Params:
        """Return h = -g_0 o grad L_S(theta_1), ``{rate/name: [B, *shape]}``."""
        first = self.loop.run(start, support, steps=1, order=order)
        again = self.loop.run(Start(first.path[-1], start.rates), support, steps=1, order=order)
        return {
            RATE + name: -g * again.gradients[0][name] for name, g in first.gradients[0].items()
        }

    def _recalled_rates(self, start: Start, h: Params, memory: BoundMemory | None) -> Start:
        """Return alpha - eta Aggr(h, H); what recalls no rates is left alone: h by itself moves none."""
        recalled = set() if memory is None else memory.recall.values.keys() & h.keys()
        if memory is None or memory.recall.m == 0 or not recalled or start.rates is None:
            return start
        moved = memory.direction(h, 0)
        used = memory.recall.active & (memory.recall.weights > 0).any(1)
        rates = dict(start.rates)
        for name in recalled:
            step = self.rate_memory * moved[name][:, None]
            rate = rates[name.removeprefix(RATE)]
            column = used.view(-1, *(1,) * (step.dim() - 1))
            rates[name.removeprefix(RATE)] = torch.where(column, rate - step, rate)
        return start._replace(rates=rates)
