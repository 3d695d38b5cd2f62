"""The same outer step as users of other packages write it. Packages are imported when they are asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module, metadata, util
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from torchemo.core.types import Episode, Params
from torchemo.lab.bench.measures.work import EPS, Work

Step: TypeAlias = Callable[[], list[Tensor]]
"""Returns the gradient of the mean query loss in the network's parameters, in their order."""

PACKAGES = {"higher": "higher", "TorchOpt": "torchopt", "learn2learn": "learn2learn"}
"""Peers by the module they need."""


def installed() -> dict[str, str]:
    """Return the versions of the peers that can be imported."""
    return {
        name: metadata.version(module)
        for name, module in PACKAGES.items()
        if util.find_spec(module) is not None
    }


def missing() -> dict[str, str]:
    """Return why peers are left out."""
    return {name: "not installed" for name in PACKAGES if name not in installed()}


def peer_makers(work: Work, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], Step]]:
    """Return how to make the step of every peer that can do the work, all from the same parameters."""
    packaged: dict[str, Callable[[nn.Module, Episode, Work], Step]] = {
        "higher": with_higher,
        "learn2learn": with_learn2learn,
        "TorchOpt": with_torchopt,
    }
    if work.head_only:
        packaged = {}
    elif work.order == 1:  # TorchOpt's optimizers have no first-order mode
        del packaged["TorchOpt"]
    makers: dict[str, Callable[[nn.Module, Episode, Work], Step]] = {
        "plain loop": plain_loop,
        "plain loop, channels last": partial(plain_loop, channels_last=True),
        **{name: make for name, make in packaged.items() if name in installed()},
    }

    def bound(make: Callable[[nn.Module, Episode, Work], Step]) -> Callable[[], Step]:
        return lambda: make(make_module(work, work.params(dtype)), work.episode(dtype), work)

    return {name: bound(make) for name, make in makers.items()}


def make_module(work: Work, params: Params) -> nn.Module:
    """Build the network as a user of the peers would, with our initial parameters."""
    blocks: list[nn.Module] = []
    for i in range(4):
        blocks += [
            nn.Conv2d(work.channels if i == 0 else work.filters, work.filters, 3, padding=1),
            nn.BatchNorm2d(work.filters, eps=EPS, track_running_stats=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    features = work.filters * (work.size // 16) ** 2
    net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(features, work.n_way))
    net.to(next(iter(params.values())).dtype)
    with torch.no_grad():
        for own, value in zip(net.parameters(), params.values(), strict=True):
            own.copy_(value)
    return net


def plain_loop(
    net: nn.Module, episode: Episode, work: Work, *, channels_last: bool = False
) -> Step:
    """Unroll with ``functional_call`` and ``autograd.grad``, one task after another.

    With a head-only learner the trunk runs once per task, as a careful user would write it.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return _PlainLoop(net, episode, work, layout).step


@dataclass(frozen=True)
class _PlainLoop:
    """A user's own loop over the tasks; ``layout`` is how its images lie in memory."""

    net: nn.Module
    episode: Episode
    work: Work
    layout: torch.memory_format

    def step(self) -> list[Tensor]:
        """Return the gradient of the mean query loss."""
        total, tasks = [torch.zeros_like(p) for p in self.net.parameters()], self.work.tasks
        for b in range(tasks):
            total = [t + r / tasks for t, r in zip(total, self._task(b), strict=True)]
        return total

    def _task(self, b: int) -> tuple[Tensor, ...]:
        """Adapt to task b and return the gradient of its query loss in all parameters."""
        work, (support, query) = self.work, (self.episode.support, self.episode.query)
        theta = {n: p.detach().requires_grad_() for n, p in self.net.named_parameters()}
        x, answered = (s.x[b].contiguous(memory_format=self.layout) for s in (support, query))
        seen, current = self._trunk(theta, x), dict(theta)
        names = [n for n in theta if not work.head_only or n.startswith(self._last)]
        for _ in range(work.steps):
            loss = cross_entropy(self._logits(current, x, seen), support.y[b])
            second = work.order == 2
            wanted = [current[n] for n in names]
            # The graph of the trunk is there once and serves all steps.
            keep = second or seen is not None
            found = torch.autograd.grad(loss, wanted, create_graph=second, retain_graph=keep)
            moved = zip(names, found, strict=True)
            current.update({n: current[n] - work.rate * g for n, g in moved})
        logits = self._logits(current, answered, self._trunk(theta, answered))
        return torch.autograd.grad(cross_entropy(logits, query.y[b]), list(theta.values()))

    @cached_property
    def _last(self) -> str:
        """What the names of the last layer begin with."""
        return f"{len(list(self.net.children())) - 1}."

    @cached_property
    def _body(self) -> nn.Module:
        return nn.Sequential(*list(self.net.children())[:-1])

    def _trunk(self, theta: Params, x: Tensor) -> Tensor | None:
        """Return the features, if the head alone is adapted."""
        if not self.work.head_only:
            return None
        own = {n: p for n, p in theta.items() if not n.startswith(self._last)}
        found: Tensor = functional_call(self._body, own, x)
        return found

    def _logits(self, theta: Params, x: Tensor, features: Tensor | None) -> Tensor:
        if features is None:
            out: Tensor = functional_call(self.net, theta, x)
            return out
        head = (theta[f"{self._last}weight"], theta[f"{self._last}bias"])
        return nn.functional.linear(features, *head)


def with_higher(net: nn.Module, episode: Episode, work: Work) -> Step:
    """Unroll with higher's functional module and differentiable SGD."""
    higher: Any = import_module("higher")
    optimizer = torch.optim.SGD(net.parameters(), lr=work.rate)
    second = work.order == 2

    def task(b: int) -> None:
        context = higher.innerloop_ctx(
            net, optimizer, copy_initial_weights=False, track_higher_grads=second
        )
        with context as (fast, inner):
            for _ in range(work.steps):
                inner.step(cross_entropy(fast(episode.support.x[b]), episode.support.y[b]))
            loss = cross_entropy(fast(episode.query.x[b]), episode.query.y[b]) / work.tasks
            if second:
                loss.backward()  # type: ignore[no-untyped-call]
                return
            # In first order the copy is cut from the network, which its gradient is nevertheless for.
            for p, g in zip(
                net.parameters(), torch.autograd.grad(loss, list(fast.parameters())), strict=True
            ):
                p.grad = g if p.grad is None else p.grad + g

    def step() -> list[Tensor]:
        net.zero_grad()
        for b in range(work.tasks):
            task(b)
        return _gradients(net)

    return step


def with_torchopt(net: nn.Module, episode: Episode, work: Work) -> Step:
    """Unroll with TorchOpt's MetaSGD and its recipe of saved states."""
    torchopt: Any = import_module("torchopt")
    inner, outer = torchopt.MetaSGD(net, lr=work.rate), list(net.parameters())

    def step() -> list[Tensor]:
        start = torchopt.extract_state_dict(net)
        optimizer_start = torchopt.extract_state_dict(inner)
        for p in outer:
            p.grad = None
        for b in range(work.tasks):
            for _ in range(work.steps):
                inner.step(cross_entropy(net(episode.support.x[b]), episode.support.y[b]))
            loss = cross_entropy(net(episode.query.x[b]), episode.query.y[b])
            (loss / work.tasks).backward()  # type: ignore[no-untyped-call]
            torchopt.recover_state_dict(net, start)
            torchopt.recover_state_dict(inner, optimizer_start)
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in outer]

    return step


def with_learn2learn(net: nn.Module, episode: Episode, work: Work) -> Step:
    """Unroll with learn2learn's MAML wrapper: clone, adapt, backward."""
    learn2learn: Any = import_module("learn2learn")
    maml = learn2learn.algorithms.MAML(net, lr=work.rate, first_order=work.order == 1)

    def step() -> list[Tensor]:
        net.zero_grad()
        for b in range(work.tasks):
            fast = maml.clone()
            for _ in range(work.steps):
                fast.adapt(cross_entropy(fast(episode.support.x[b]), episode.support.y[b]))
            loss = cross_entropy(fast(episode.query.x[b]), episode.query.y[b])
            (loss / work.tasks).backward()  # type: ignore[no-untyped-call]
        return _gradients(net)

    return step


def _gradients(net: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
