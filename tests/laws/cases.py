"""Tiny problems on which every learner, aggregator and rule must obey the same laws.

A new entry of a registry is a new case: the law suite needs no new code for it.
"""

import copy
import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from torchemo.config.run import (
    AggregatorConfig,
    EMOConfig,
    LearnerConfig,
    MemoryConfig,
    ValueConfig,
)
from torchemo.core.types import Batch, Episode, Model, Params, TaskShape
from torchemo.learners import LEARNERS, Learner
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.inner import RULES
from torchemo.learners.gradient.tsa_maml import SOLUTIONS
from torchemo.learners.learner import Staged, learned
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.aggregators.build import build_aggregator
from torchemo.memory.consolidation import SlotAdam
from torchemo.memory.emo import EMO
from torchemo.memory.keys.encoder import TransformerKey
from torchemo.memory.policy import Policy
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory
from torchemo.models import MLP, Conv4
from torchemo.runs.build import remembered_shapes
from torchemo.training.step import OuterStep, outer_step

N_WAY, N_IN, TASKS, SLOTS, K, STEPS, KEY_DIM = 3, 2, 2, 4, 3, 2, 4
MODEL = MLP(N_WAY, n_in=N_IN, hidden=(4,), initializer="kaiming", activation="tanh")


@dataclass(frozen=True)
class Problem:
    """A network and the inputs it takes. A new one is a new suite: tests/laws/test_fused.py."""

    model: Model
    x: tuple[int, ...]

    @property
    def shape(self) -> TaskShape:
        return TaskShape("classification", self.x, N_WAY)


SMOOTH = Problem(MODEL, (N_IN,))
FUSED = Problem(Conv4(N_WAY, in_channels=2, image_size=16, filters=3, path="fused"), (2, 16, 16))
problem = SMOOTH
"""The one in use; a test module sets another for its own tests."""

LEARNER_CASES = {
    **{name: LearnerConfig(name=name) for name in LEARNERS},
    "meta-sgd/per_tensor": LearnerConfig(name="meta-sgd", rate_shape="per_tensor"),
    "meta-sgd/scalar": LearnerConfig(name="meta-sgd", rate_shape="scalar"),
    "meta-sgd/rate_memory": LearnerConfig(name="meta-sgd", rate_memory=0.1),
    "maml++/plain": LearnerConfig(name="maml++", multi_step_loss=False, learned_rates=False),
    "maml++/first_order": LearnerConfig(name="maml++", first_order_epochs=1),
    "reptile/minibatch": LearnerConfig(name="reptile", minibatch=2),
    "arml": LearnerConfig(name="arml", task_dim=3, vertices=2, aux_weight=0.5),
    "hsml": LearnerConfig(name="hsml", task_dim=3, tree=(3, 2), aux_weight=0.5),
    "tsa-maml": LearnerConfig(name="tsa-maml", groups=2),
    "tsa-maml/groups": LearnerConfig(name="tsa-maml", groups=2, first_stage=0, cluster_tasks=2),
    "musml/one": LearnerConfig(name="musml", subspaces=1),
    "bmg/l2": LearnerConfig(name="bmg", base="meta-sgd", match="l2", target_steps=2),
}
RULE_CASES = tuple(RULES)
EMO_CASES = (*AGGREGATORS, "consolidate")
RATES = {"sgd": 0.5, "momentum": 0.3, "adam": 0.1}


class FlatEmbedder(nn.Module):
    """Embed vectors by a fixed linear map of the inputs alone."""

    dim = KEY_DIM

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        n_in = math.prod(problem.x)
        self.linear = nn.Linear(n_in, KEY_DIM, bias=False)
        drawn = torch.randn(KEY_DIM, n_in, generator=generator)
        self.linear.weight.data = drawn * (N_IN / n_in) ** 0.5

    def forward(self, support: Batch, params: Params | None = None) -> Tensor:
        return self.linear(support.x.flatten(2))


def double(params: Params) -> Params:
    return {name: p.double() if p.is_floating_point() else p for name, p in params.items()}


def make_learner(case: str, rule: str = "sgd") -> Learner:
    config = replace(LEARNER_CASES[case], rule=rule, inner_lr=RATES[rule], steps=STEPS)
    if "meta-sgd" in (config.name, config.base):
        config = replace(config, rate_init=(0.1 * RATES[rule], 2 * RATES[rule]))
    if config.name == "musml":  # a coordinate moves a whole network, and its prototypes, at once
        config = replace(config, inner_lr=0.1 * RATES[rule])
    return build_learner(config, problem.model, problem.shape)


def make_params(learner: Learner, seed: int = 0) -> Params:
    params = double(learner.init(torch.Generator().manual_seed(seed)))
    jitter = torch.Generator().manual_seed(seed + 1)
    # Zero biases and equal rates would hide mistakes.
    for name in learned(learner, params):
        noise = torch.randn(params[name].shape, generator=jitter, dtype=torch.float64)
        params[name] = params[name] + 0.05 * noise
    return _last_stage(learner, params)


def _last_stage(learner: Learner, params: Params) -> Params:
    """Bring a learner that collects tasks first to where it has them."""
    seed = 0
    while isinstance(learner, Staged) and any(name.startswith(SOLUTIONS) for name in params):
        step = outer_step(learner, params, make_episode(50 + seed))
        found = learner.advance(params, step.gradients, about=step.about, iteration=seed)
        params = {**learned(learner, params), **found.resets, **found.state}
        seed += 1
    return params


def plain_step(case: str, rule: str = "sgd") -> OuterStep:
    """Return the base learner's step on `make_episode`: computed once, as many laws compare with it."""
    return _plain_step(problem, case, rule)


@cache
def _plain_step(problem: Problem, case: str, rule: str) -> OuterStep:
    learner = make_learner(case, rule)
    return outer_step(learner, make_params(learner), make_episode())


def make_episode(seed: int = 0, *, tasks: int = TASKS) -> Episode:
    g = torch.Generator().manual_seed(100 + seed)

    def batch(per_class: int) -> Batch:
        y = torch.arange(N_WAY).repeat(tasks, per_class)
        order = torch.stack([torch.randperm(y.shape[1], generator=g) for _ in range(tasks)])
        y = y.gather(1, order)
        x = torch.randn(*y.shape, *problem.x, generator=g, dtype=torch.float64)
        return Batch(x + y.view(*y.shape, *(1 for _ in problem.x)), y)

    return Episode(batch(1), batch(2), index=torch.arange(tasks))


def make_emo(
    case: str,
    learner: Learner,
    *,
    capacity: int = SLOTS,
    filled: bool = True,
    weights: str = "softmax",
    trained: bool = True,
    **policy: object,
) -> EMO:
    """Build EMO with aggregator ``case`` (or consolidation) and a memory of random experiences."""
    consolidate = case == "consolidate"
    content = "meta" if consolidate else str(policy.pop("content", "first"))
    config = EMOConfig(
        memory=MemoryConfig(write="consolidate" if consolidate else "replace"),
        value=ValueConfig(content=content, head_align=str(policy.get("head_align", "none"))),
    )
    shapes = remembered_shapes(config, learner)
    kind = "sum" if consolidate else case
    g = torch.Generator().manual_seed(4)
    emo = EMO(
        EpisodicMemory(capacity, KEY_DIM, value_dtype=torch.float64, key_dtype=torch.float64),
        Retrieval(K, weights=weights, temperature=1.0),
        build_aggregator(
            AggregatorConfig(kind=kind, layers=1),
            shapes,
            k=K,
            steps=STEPS,
            head=problem.model.head,
            seed=0,
        ),
        encoder=copy.deepcopy(_encoder(problem)),
        policy=Policy(
            content=content,
            write="consolidate" if consolidate else "replace",
            slots=SlotAdam(lr=0.1, key_lr=0.1),
            n_way=N_WAY,
            **{"memory_steps": "all", **policy},
        ),
        head=(*problem.model.head, *(f"rate/{n}" for n in problem.model.head)),
    ).double()
    if trained:
        perturb(emo, g)
    if filled and capacity:
        fill(emo, shapes, g, notes=_notes(emo, g))
    return emo


@cache
def _encoder(problem: Problem) -> TransformerKey:
    g = torch.Generator().manual_seed(3)
    return TransformerKey(FlatEmbedder(g), generator=g, dim=KEY_DIM, layers=1, heads=2, ff=8)


def perturb(emo: EMO, generator: torch.Generator) -> None:
    """Move every parameter of the aggregator, so that zero-initialised gates do not hide anything."""
    with torch.no_grad():
        for p in emo.aggregator.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def fill(emo: EMO, shapes, generator: torch.Generator, *, notes: Params | None = None) -> None:
    n = emo.memory.capacity
    randn = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)  # noqa: E731
    keys = nn.functional.normalize(randn(n, KEY_DIM), dim=1)
    lead = (n, STEPS) if emo.policy.content == "per_step" else (n,)
    emo.memory.write(keys, {m: 0.3 * randn(*lead, *s) for m, s in shapes.items()}, notes=notes)


def _notes(emo: EMO, generator: torch.Generator) -> Params:
    n = emo.memory.capacity
    if emo.policy.head_align != "hungarian":
        return {}
    return {"prototypes": torch.randn(n, N_WAY, KEY_DIM, generator=generator, dtype=torch.float64)}
