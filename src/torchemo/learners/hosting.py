"""What a memory needs to know about a learner."""

import torch

from torchemo.learners.learner import (
    Learner,
    OwnGradient,
    Remembers,
    Staged,
    Stepwise,
    moving,
    steps_of,
)
from torchemo.memory.interface import Host


def remembered_by(learner: Learner, content: str) -> dict[str, torch.Size]:
    """Return names and shapes of what a memory of ``content`` holds for a task of this learner."""
    if isinstance(learner, Remembers):
        return learner.remembered(content)
    network = learner.model.init(torch.Generator())
    if content == "meta":
        own, fixed = learner.init(torch.Generator()), learner.model.buffers
        wanted = {n: p for n, p in network.items() if n in own and n not in fixed}
        return {n: p.shape for n, p in moving(learner, wanted).items()}
    return {n: network[n].shape for n in adapted_by(learner)}


def adapted_by(learner: Learner) -> list[str]:
    """Return the names of the network's tensors that inner steps move; none without an inner loop."""
    if not isinstance(learner, Stepwise):
        return []
    return learner.adapted(learner.model.init(torch.Generator()))


def host(learner: Learner) -> Host:
    """Return what a memory needs to know about a learner."""
    key_dim = getattr(learner, "key_dim", None)
    return Host(
        title=learner.title,
        model=learner.model,
        steps=steps_of(learner),
        inner_loop=learner.traits.inner_loop,
        adapted=tuple(adapted_by(learner)),
        remembered=lambda content: remembered_by(learner, content),
        key_dim=key_dim,
        groups=isinstance(learner, Staged),
        differentiable=not isinstance(learner, OwnGradient),
    )
