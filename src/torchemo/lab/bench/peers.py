"""The same outer step as users of other packages write it. Packages are imported when they are asked for."""

from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata, util
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from torchemo.core.types import Episode, Params
from torchemo.lab.bench.work import EPS, Work

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
    """Say why a peer is left out."""
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
    body = nn.Sequential(*list(net.children())[:-1]) if isinstance(net, nn.Sequential) else net
    last = f"{len(list(net.children())) - 1}."

    def logits(theta: Params, x: Tensor, features: Tensor | None) -> Tensor:
        if features is None:
            out: Tensor = functional_call(net, theta, x)
            return out
        return nn.functional.linear(features, theta[f"{last}weight"], theta[f"{last}bias"])

    def trunk(theta: Params, x: Tensor) -> Tensor | None:
        if not work.head_only:
            return None
        own = {n: p for n, p in theta.items() if not n.startswith(last)}
        found: Tensor = functional_call(body, own, x)
        return found

    def task(b: int) -> tuple[Tensor, ...]:
        theta = {n: p.detach().requires_grad_() for n, p in net.named_parameters()}
        x = episode.support.x[b].contiguous(memory_format=layout)
        query = episode.query.x[b].contiguous(memory_format=layout)
        seen, current = trunk(theta, x), dict(theta)
        names = [n for n in theta if not work.head_only or n.startswith(last)]
        for _ in range(work.steps):
            loss = cross_entropy(logits(current, x, seen), episode.support.y[b])
            second = work.order == 2
            wanted = [current[n] for n in names]
            keep = second or seen is not None
            found = torch.autograd.grad(loss, wanted, create_graph=second, retain_graph=keep)
            moved = zip(names, found, strict=True)
            current.update({n: current[n] - work.rate * g for n, g in moved})
        loss = cross_entropy(logits(current, query, trunk(theta, query)), episode.query.y[b])
        return torch.autograd.grad(loss, list(theta.values()))

    def step() -> list[Tensor]:
        total = [torch.zeros_like(p) for p in net.parameters()]
        for b in range(work.tasks):
            total = [t + r / work.tasks for t, r in zip(total, task(b), strict=True)]
        return total

    return step


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
