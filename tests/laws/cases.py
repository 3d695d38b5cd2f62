"""Tiny problems on which every learner, memory, aggregator and rule must obey the same laws.

A new entry of a registry is a new case: the law suite needs no new code for it. Options of `SMALL` make a
part small; what has none is taken with its defaults.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor, nn

from torchemo.config.registry import Part, Registry
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand, select
from torchemo.core.types import Batch, Episode, Model, Params, Start, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.inner import RULES
from torchemo.learners.gradient.tsa_maml import SOLUTIONS
from torchemo.learners.hosting import host
from torchemo.learners.learner import Learner, Staged, learned, network_names, start_of
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.aggregators.aggregator import Aggregator, Joined
from torchemo.memory.bound import BoundMemory
from torchemo.memory.build import head_names, remembered_shapes
from torchemo.memory.emo import EMO
from torchemo.memory.interface import TaskMemory
from torchemo.memory.keys.transformer import TransformerKey
from torchemo.memory.offsets import OffsetMemory
from torchemo.memory.recall import Retrieval
from torchemo.memory.slots import SlotAdam
from torchemo.memory.store import EpisodicMemory
from torchemo.models import MLP, Conv4
from torchemo.training.predict import begin_at, recalled
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
        return TaskShape("classification", self.x, N_WAY, base_classes=5)


SMOOTH = Problem(MODEL, (N_IN,))
FUSED = Problem(Conv4(N_WAY, in_channels=2, image_size=16, filters=4, path="fused"), (2, 16, 16))
problem = SMOOTH
"""The one in use; a test module sets another for its own tests."""

SMALL = {
    "arml": {"task_dim": 3, "vertices": 2, "aux_weight": 0.5},
    "hsml": {"task_dim": 3, "tree": (3, 2), "aux_weight": 0.5},
    "tsa-maml": {"groups": 2},
    "gate": {"layers": 1},
    "relationnet": {"filters": 3, "units": 4, "loss": "cross_entropy"},
    "ctm": {"filters": 4},
    "snail": {"filters": 2, "widths": (2, 2, 2), "longest": 9},
    "variational-fsl": {"hidden": 3, "kl_weight": 0.0},
}
"""Options of parts that are large by default."""

VARIANTS = {
    "meta-sgd/per_tensor": Part("meta-sgd", {"rate_shape": "per_tensor"}),
    "meta-sgd/scalar": Part("meta-sgd", {"rate_shape": "scalar"}),
    "meta-sgd/rate_memory": Part("meta-sgd", {"rate_memory": 0.1}),
    "maml/shared_row": Part("maml", {"shared_row": True}),
    "anil/shared_row": Part("anil", {"shared_row": True}),
    "meta-sgd/shared_row": Part("meta-sgd", {"shared_row": True}),
    "maml++/plain": Part("maml++", {"multi_step_loss": False, "learned_rates": False}),
    "maml++/first_order": Part("maml++", {"first_order_epochs": 1}),
    "reptile/minibatch": Part("reptile", {"minibatch": 2}),
    "tsa-maml/groups": Part("tsa-maml", {"groups": 2, "first_stage": 0, "cluster_tasks": 2}),
    "musml/one": Part("musml", {"subspaces": 1}),
    "bmg/l2": Part("bmg", {"base": Part("meta-sgd"), "match": "l2", "target_steps": 2}),
    "matchingnet/learn_scale": Part("matchingnet", {"scale": 3.0, "learn_scale": True}),
}
"""Learners with other options than their defaults."""

OFFSETS = "offsets"
LEARNER_CASES = {**{name: Part(name, SMALL.get(name, {})) for name in LEARNERS}, **VARIANTS}
RULE_CASES = tuple(RULES)
MEMORY_CASES = (*AGGREGATORS, OFFSETS)
"""Memories of gradients by their aggregator, and the memory of offsets."""

RATES = {"sgd": 0.5, "momentum": 0.3, "adam": 0.1}
SLOWER = {"musml": 0.1}
"""Learners that need smaller inner rates: a coordinate moves a whole network, and its prototypes, at once."""


def fitting_memories(case: str) -> tuple[str, ...]:
    """List the memories that a learner can have: those of gradients join inner steps and nothing else."""
    learner = make_learner(case)
    joined = tuple(AGGREGATORS) if learner.traits.inner_loop else ()
    if "shared_row" in case:
        # Equal rows send the body no gradient in the first step; the gate reads the logarithm of its norm,
        # whose slope has no bound there.
        joined = tuple(name for name in joined if name != "gate")
    return (*joined, OFFSETS) if takes_offsets(learner) else joined


def takes_offsets(learner: Learner) -> bool:
    """Return whether a learner can start from offsets; one that also remembers its rates cannot."""
    try:
        return bool(host(learner).remembered("meta"))
    except ConfigError:
        return False


def fitting_rules(case: str) -> tuple[str, ...]:
    """List the rules that a learner can step by; without an inner loop there is nothing to choose."""
    return RULE_CASES if make_learner(case).traits.inner_loop else ("sgd",)


def pairs(*, alone: bool = False) -> list[tuple[str, str | None]]:
    """List every learner with every memory that fits, with ``alone`` also with none."""
    none = [None] if alone else []
    return [(case, memory) for case in LEARNER_CASES for memory in (*none, *fitting_memories(case))]


def triples() -> Iterator[tuple[str, str | None, str]]:
    """Yield each two of a learner, a memory that fits or none, and a rule; MAML meets all three together."""
    for case, memory in pairs(alone=True):
        rules = fitting_rules(case) if case == "maml" or memory is None else ("sgd",)
        yield from ((case, memory, rule) for rule in rules)


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


def option_names(registry: Registry, name: str) -> set[str]:
    return {option.name for option in fields(registry.options_of(name))}


def tuned(part: Part, rule: str) -> Part:
    """Give a learner with an inner loop, or the one underneath, rates and steps of this suite."""
    known = option_names(LEARNERS, part.name)
    if "base" in known:
        under = part.options.get("base", LEARNERS.options_of(part.name)().base)
        return part.set(base=tuned(under, rule))
    rate = RATES[rule]
    wanted = {
        "rule": rule,
        "inner_lr": rate * SLOWER.get(part.name, 1),
        "steps": STEPS,
        "rate_init": (0.1 * rate, 2 * rate),
    }
    return part.set(**{n: value for n, value in wanted.items() if n in known})


def make_learner(case: str, rule: str = "sgd") -> Learner:
    return build_learner(tuned(LEARNER_CASES[case], rule), problem.model, problem.shape)


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


def begin(
    learner: Learner, params: Params, episode: Episode, memory: TaskMemory | None = None
) -> tuple[Start, BoundMemory | None, Tensor | float]:
    """Return where tasks begin, the memory for their inner steps, and what is added to their losses."""
    theta = select(params, network_names(params))
    base = expand(theta, len(episode.support.x))
    with torch.no_grad():
        start = start_of(learner, params, episode.support, base=base)
        held = None if memory is None else recalled(memory, theta, episode, start)
        moved = begin_at(start, {} if held is None else held.memory.offset(held.recall))
    added = 0.0 if start.auxiliary is None else start.auxiliary
    return moved, None if held is None else held.bind(), added


def make_memory(
    case: str,
    learner: Learner,
    *,
    capacity: int = SLOTS,
    filled: bool = True,
    weights: str = "softmax",
    trained: bool = True,
    **options: object,
) -> TaskMemory:
    """Build a memory with aggregator ``case``, or of offsets, filled with random experiences."""
    store = EpisodicMemory(capacity, KEY_DIM, value_dtype=torch.float64, key_dtype=torch.float64)
    retrieval = Retrieval(K, weights=weights, temperature=1.0)
    about = host(learner)
    parts = {"encoder": copy.deepcopy(_encoder(problem)), "head": head_names(about)}
    if case == OFFSETS:
        content = "meta"
        shapes = remembered_shapes(about, content)
        slots = SlotAdam(lr=0.1, key_lr=0.1)
        memory: TaskMemory = OffsetMemory(store, retrieval, slots=slots, **parts, **options)
    else:
        options = {"content": "first", "head_align": "none", "memory_steps": "all", **options}
        content, drop = options["content"], options["head_align"] == "drop"
        shapes = remembered_shapes(about, content, drop_head=drop)
        joins = make_aggregator(case, shapes)
        memory = EMO(store, retrieval, joins, n_way=N_WAY, **parts, **options)
    memory = memory.double()
    g = torch.Generator().manual_seed(4)
    if trained:
        perturb(memory, g)
    if filled and capacity:
        fill(memory, shapes, g, notes=_notes(memory, g))
    return memory


def make_aggregator(case: str, shapes: dict[str, torch.Size]) -> Aggregator:
    kind, options = AGGREGATORS.resolve(Part(case, SMALL.get(case, {})))
    generator = torch.Generator().manual_seed(0)
    return kind.build(options, Joined(shapes, K, STEPS, problem.model.head, generator))


@cache
def _encoder(problem: Problem) -> TransformerKey:
    g = torch.Generator().manual_seed(3)
    return TransformerKey(FlatEmbedder(g), generator=g, dim=KEY_DIM, layers=1, heads=2, ff=8)


def perturb(memory: TaskMemory, generator: torch.Generator) -> None:
    """Move what inner steps use of a memory, so that zero-initialised gates do not hide anything."""
    with torch.no_grad():
        for p in memory.inner_parameters().values():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def fill(
    memory: TaskMemory,
    shapes: dict[str, torch.Size],
    generator: torch.Generator,
    *,
    notes: Params | None = None,
) -> None:
    n = memory.store.capacity
    randn = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)  # noqa: E731
    keys = nn.functional.normalize(randn(n, KEY_DIM), dim=1)
    lead = (n, STEPS) if memory.content == "per_step" else (n,)
    memory.store.write(keys, {m: 0.3 * randn(*lead, *s) for m, s in shapes.items()}, notes=notes)


def _notes(memory: TaskMemory, generator: torch.Generator) -> Params:
    n = memory.store.capacity
    if not memory.keeps_prototypes:
        return {}
    return {"prototypes": torch.randn(n, N_WAY, KEY_DIM, generator=generator, dtype=torch.float64)}
