"""EMO: the paper's memory of gradients (Eq. 4 to 7; Algorithms 1 and 2).

Three verbs for your own training loop: `recall` what similar tasks did, `combine` it with the gradient at
hand, `remember` this task. Tasks carry a leading axis B everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor, nn

from torchemo.config.registry import Part, Registry
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.tree import check_same_structure, in_dtype_of, select, tree_map
from torchemo.core.types import Batch, Params, Recall, TaskShape
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.aggregators.aggregator import Aggregator, Joined
from torchemo.memory.aggregators.parts import clip
from torchemo.memory.alignment import align_heads
from torchemo.memory.bound import BoundMemory
from torchemo.memory.build import (
    MemoryOptions,
    check_groups,
    check_host,
    check_joins,
    head_names,
    remembered_shapes,
)
from torchemo.memory.controllers import CONTROLLERS, build_controller
from torchemo.memory.interface import Host, TaskMemory, check_choice, column
from torchemo.memory.keys import KEYS
from torchemo.memory.recall import Retrieval, own_generations
from torchemo.memory.store import EpisodicMemory
from torchemo.memory.values import Content, at_step, check_gradients, leading_axes, pick

RecallStep: TypeAlias = Literal["off", "eval_only", "always"]
HeadAlign: TypeAlias = Literal["none", "drop", "hungarian"]
Scope: TypeAlias = Literal["shared", "group"]


@final
@dataclass(frozen=True)
class EMOOptions(MemoryOptions):
    """Options of the paper's memory of gradients."""

    PARTS: ClassVar[dict[str, Registry]] = {
        "key": KEYS,
        "aggregator": AGGREGATORS,
        "controller": CONTROLLERS,
    }

    content: Content = "first"
    """Support gradient at the first, last, mean or every step, every step with its curvature along the inner
    path (secant), query gradient, or outer gradient (A6)."""
    reduction: Literal["own", "sum", "n_way"] = "own"
    """own: stored gradients are those of the inner loss. sum and n_way multiply them by the number of support
    examples or of classes beside an own gradient that is left as it is (A12)."""
    value_clip: float | None = None
    """Clip a recalled tensor to this multiple of the own gradient's norm (A25)."""
    head_align: HeadAlign = "none"
    """Label order of head gradients: as stored, left out, or matched by prototypes (A7)."""
    memory_steps: Literal["all", "first"] | float = "first"
    """Inner steps that use the recall; a number in (0, 1) is a decay per step (A6). The paper: all."""
    scope: Scope = "shared"
    """group: a task recalls only what its own group remembers (tsa-maml)."""
    aggregator: Part = field(default_factory=lambda: Part("sum"))
    """How recalled and own gradients become a direction (Eq. 8 to 10)."""
    controller: Part = field(default_factory=lambda: Part("lru"))
    """What a full memory forgets. The paper: lru for MAML and ANIL, clock for Meta-SGD."""

    def scale(self, tasks: TaskShape) -> float:
        """Return the factor of stored gradients."""
        if self.content in ("query", "meta"):
            return 1.0
        return float({"own": 1, "sum": tasks.support, "n_way": tasks.n_out}[self.reduction])


@final
class EMO(TaskMemory):
    """Remember the gradients of single tasks and join those of similar tasks to inner steps.

    Example:
        >>> import torch
        >>> from torchemo.memory.aggregators import Sum
        >>> emo = EMO(EpisodicMemory(10, 2), Retrieval(k=5), Sum())
        >>> grads = {"w": torch.ones(1, 3)}
        >>> recall = emo.recall(torch.zeros(1, 2))             # nothing is remembered yet
        >>> emo.combine(grads, recall)["w"].tolist()
        [[1.0, 1.0, 1.0]]
        >>> emo.remember(recall, grads)
        >>> recall = emo.recall(torch.zeros(1, 2))             # the same task again
        >>> emo.combine(grads, recall)["w"].tolist()
        [[2.0, 2.0, 2.0]]

    Args:
        store: The slots.
        retrieval: kNN and its weights.
        aggregator: Mean, Sum, Gated or Transformer.
        content: What a value is (A6): the ``first``, ``last`` or ``mean`` support gradient, one
            ``per_step``, the same with its curvature along the path (``secant``, see
            `torchemo.memory.values`), the gradient of the ``query`` loss at theta_S, or the task's outer
            gradient (``meta``).
        memory_steps: Inner steps that use the recall: ``all`` (the paper), ``first``, or a decay rho in
            (0, 1): weight rho^s at step s.
        recall_step: A step along the recall alone before the first support gradient (A4).
        head_align: What to do about the label order of head gradients (A7): ``none`` (the paper), ``drop``
            them, or match classes by prototypes (``hungarian``; needs ``n_way``).
        n_way: Number of classes of a task, for prototypes.
        value_clip: Clip a recalled tensor to this multiple of the own gradient's norm (A25).
        value_scale: Factor of stored values: N*K stores the sum over the support set (A12).
        rekey_every: Recompute all stored keys every this many batches (A23); stores the support sets.
        scope: ``shared`` by all tasks, or a task recalls only what its own ``group`` remembers (TSA-MAML).
            The groups share the slots: the controller forgets the oldest of any.
        others: What all memories share, see `TaskMemory`.
    """

    adapted: Mapping[str, torch.Size] | None = None
    """Names and shapes of the gradients that `combine` accepts; None accepts all."""

    title: ClassVar[str] = "EMO"
    Options: ClassVar[type[EMOOptions]] = EMOOptions

    @classmethod
    def build(
        cls,
        options: EMOOptions,
        host: Host,
        tasks: TaskShape,
        *,
        seed: int = 0,
        train_steps: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "EMO":
        """Make the memory from its options, for a learner on such tasks."""
        check_host(host, scope=options.scope)
        encoder = options.encoder(host, tasks, seed=seed)
        controller = build_controller(options.controller, seed=seed)
        kind, own = AGGREGATORS.resolve(options.aggregator)
        drop = options.head_align == "drop"
        shapes = remembered_shapes(host, options.content, tensors=options.tensors, drop_head=drop)
        generator, k = generator_for(seed, "aggregator"), options.k or options.capacity
        aggregator = kind.build(own, Joined(shapes, k, host.steps, head_names(host), generator))
        check_joins(host, shapes, aggregator, name=options.aggregator.name)
        emo = cls(
            options.store(encoder, host, controller=controller, dtype=dtype),
            options.retrieval(),
            aggregator,
            content=options.content,
            memory_steps=options.memory_steps,
            head_align=options.head_align,
            n_way=tasks.n_way,
            value_clip=options.value_clip,
            value_scale=options.scale(tasks),
            scope=options.scope,
            **options.shared(encoder, host, seed=seed),
        )
        return emo.to(dtype)

    def __init__(
        self,
        store: EpisodicMemory,
        retrieval: Retrieval,
        aggregator: Aggregator,
        *,
        content: Content = "first",
        memory_steps: Literal["all", "first"] | float = "first",
        recall_step: RecallStep = "off",
        head_align: HeadAlign = "none",
        n_way: int | None = None,
        value_clip: float | None = None,
        value_scale: float = 1.0,
        rekey_every: int | None = None,
        scope: Scope = "shared",
        **others: Any,
    ) -> None:
        super().__init__(store, retrieval, drop_head=head_align == "drop", **others)
        self.aggregator = aggregator
        self.content = content
        self.memory_steps = memory_steps
        self.recall_step = recall_step
        self.head_align = head_align
        self.n_way = n_way
        self.value_clip = value_clip
        self.value_scale = value_scale
        self.rekey_every = rekey_every
        self.scope = scope
        self._check_choices()
        self._check_needs()
        if scope == "group":
            check_groups(aggregator, retrieval)
        mixes = aggregator.any_number or hasattr(aggregator, "mixing_near")
        if retrieval.max_distance is not None and not mixes:
            raise ConfigError(
                "max_distance lets tasks recall different numbers of slots, which this aggregator does not"
                " take.",
                hint="Use Mean, Sum or Gated.",
            )

    def _check_choices(self) -> None:
        check_choice("content", self.content, get_args(Content))
        check_choice("recall_step", self.recall_step, get_args(RecallStep))
        check_choice("head_align", self.head_align, get_args(HeadAlign))
        check_choice("scope", self.scope, get_args(Scope))
        use = self.memory_steps
        if not (0 < use < 1 if isinstance(use, float) else use in ("all", "first")):
            raise ConfigError(
                f"memory_steps should be 'all', 'first' or a decay in (0, 1), got {use!r}."
            )
        for name in ("n_way", "rekey_every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} should be None, or 1 or more; got {number}.")
        if self.content == "secant" and self.value_scale != 1:
            raise ConfigError(
                f"content 'secant' keeps gradients as they are, got value_scale {self.value_scale}.",
                hint="Set memory.reduction to own.",
            )
        if self.value_clip is not None and not self.value_clip >= 0:
            raise ConfigError(f"value_clip should not be negative, got {self.value_clip}.")

    def _check_needs(self) -> None:
        align = self.head_align
        if align != "none" and not self.head:
            raise ConfigError(f"head_align '{align}' needs the names of the head tensors.")
        if align == "hungarian" and self.n_way is None:
            raise ConfigError("head_align 'hungarian' needs n_way.", hint="Set n_way of the tasks.")
        if self.encoder is None and (self.keeps_prototypes or self.keeps_support):
            what = "head_align 'hungarian'" if self.keeps_prototypes else "re-keying"
            raise ConfigError(f"{what} needs a key encoder.", hint="Pass encoder=...")

    # -- recall ------------------------------------------------------------------------------------

    def _aligned(self, recall: Recall, own: Params) -> Recall:
        if self.head_align != "hungarian":
            return recall
        axis = 2 + leading_axes(self.content)
        return align_heads(recall, own["prototypes"], head=self.head, class_axis=axis)

    def _own_notes(
        self, support: Batch | None, params: Params | None, **tags: Tensor | None
    ) -> Params:
        wanted = ("domain", "group") if self.scope == "group" else ("domain",)
        notes = {n: tag for n, tag in tags.items() if n in wanted and tag is not None}
        if self.scope == "group" and "group" not in notes:
            raise ConfigError("a memory per group needs a learner that groups tasks (tsa-maml).")
        if self.keeps_prototypes or self.keeps_support:
            if support is None or self.encoder is None:
                raise ConfigError("recall: head alignment and re-keying need the support sets.")
            way = self.classes or self.n_way
            if self.keeps_prototypes and way is not None:
                with torch.no_grad():
                    notes["prototypes"] = self.encoder.prototypes(support, way, params=params)
            if self.keeps_support:
                notes |= {"support_x": support.x, "support_y": support.y}
        return notes

    # -- use ---------------------------------------------------------------------------------------

    @property
    def keeps_support(self) -> bool:
        """For re-keying."""
        return self.rekey_every is not None

    @property
    def keeps_prototypes(self) -> bool:
        """For head alignment."""
        return self.head_align == "hungarian"

    def inner_parameters(self) -> dict[str, nn.Parameter]:
        """Return the aggregator's parameters."""
        named = self.aggregator.named_parameters()
        return {f"aggregator.{n}": p for n, p in named if p.requires_grad}

    def bind(self, recall: Recall) -> BoundMemory:
        """Hold a recall for an inner loop."""
        return BoundMemory(self, recall)

    def combine(
        self, grads: Params, recall: Recall, *, step: int = 0, theta: Params | None = None
    ) -> Params:
        """Return Aggr(g, V), the direction of inner step ``step`` (Eq. 7).

        Args:
            grads: Support gradients g at this step, ``{name: [B, *shape]}``.
            recall: What was recalled for the tasks, once, before the first step.
            step: Inner step s.
            theta: Parameters at this step; only values with curvature (``secant``) need them.
        """
        if self.adapted is not None:
            check_gradients(grads, self.adapted, tasks=len(recall.keys))
        if self.store.capacity == 0:
            return grads
        part = self._part(recall, grads, step, theta)
        if part is None:
            return self.aggregator.own_only(grads)
        combined = in_dtype_of(grads, recall.keys, lambda g: self.aggregator(g, part, step=step))
        if bool(recall.on_host()[1].all()):
            return combined
        own = self.aggregator.own_only(grads)
        return tree_map(lambda c, o: torch.where(column(recall.active, c), c, o), combined, own)

    def opening(self, recall: Recall) -> Params | None:
        """Return the direction of the recall step before the first support gradient, or None."""
        off = self.recall_step == "off" or (self.recall_step == "eval_only" and self.training)
        if off or recall.m == 0 or self.store.capacity == 0:
            return None
        # All tasks are at their start, where the gradients of step 0 belong: nothing to correct.
        part = recall._replace(values=at_step(recall.values, self.content, 0, None))
        alone = self.aggregator.recall_only(part)
        return tree_map(lambda d: d * column(recall.active, d), alone)

    def _part(
        self, recall: Recall, grads: Params, step: int, theta: Params | None
    ) -> Recall | None:
        """Return the recall as used at ``step`` for the tensors in ``grads``; None if it is not."""
        use = self.memory_steps
        names = [name for name in grads if name in recall.values]
        if recall.m == 0 or not names or (use == "first" and step > 0):
            return None
        if self.content == "secant" and theta is None:
            raise ConfigError(
                "combine: content 'secant' needs the parameters at this step.",
                hint="Pass theta=..., {name: [B, *shape]}.",
            )
        values = at_step(select(recall.values, names), self.content, step, theta)
        shapes = {name: grads[name].shape[1:] for name in names}
        check_same_structure(shapes, values, what="recalled gradients", leading=2)
        if isinstance(use, float):
            values = tree_map(lambda v: v * use**step, values)
        if self.value_clip is not None:
            values = {n: clip(v, grads[n], self.value_clip) for n, v in values.items()}
        return recall._replace(values=values)

    # -- remember ----------------------------------------------------------------------------------

    @property
    def wants(self) -> Literal["support", "query", "outer"]:
        """Which gradients of a task are stored."""
        if self.content == "query":
            return "query"
        return "outer" if self.content == "meta" else "support"

    def value(
        self,
        gradients: tuple[Params, ...] = (),
        *,
        path: tuple[Params, ...] = (),
        query: Params | None = None,
        rows: Params | None = None,
        extra: Params | None = None,
    ) -> Params:
        """Pick the gradients to remember of B tasks (``content``), detached. See `TaskMemory.value`."""
        sources = {"query": query, "meta": rows}
        if self.content not in sources:
            picked = pick(self.content, gradients, path, extra or {})
        elif (source := sources[self.content]) is None:
            raise ConfigError(f"there is no '{self.content}' gradient to remember.")
        else:
            picked = source | (extra or {})
        scale = self.value_scale
        return {n: v.detach() * scale for n, v in picked.items() if self.remembers(n)}

    def _controlled(self, values: Params) -> Params:
        if self.content != "secant" or self.control == "none":
            return super()._controlled(values)
        # Anchors are parameters, no directions: they stay, and random slopes have no curvature.
        drawn = super()._controlled({n: v[:, :, 0] for n, v in values.items()})
        parts = {n: (drawn[n], v[:, :, 1], torch.zeros_like(drawn[n])) for n, v in values.items()}
        return {n: torch.stack(three, 2) for n, three in parts.items()}

    def _write(
        self, recall: Recall, values: Params, rate_factor: float, slot_key_gradient: Tensor | None
    ) -> None:
        """Touch what was recalled, then write B tasks in order (Eq. 6)."""
        keys, notes = recall.keys.detach(), recall.own_notes or {}
        # Checked before the first touch, so that a refused batch changes nothing at all.
        self.store.check_write(keys, values, notes)
        read = own_generations(recall)
        slots, used = recall.on_host()
        self.store.touch(slots[used], generations=read[used])
        self.store.write(keys, values, notes=notes, checked=True)

    def _finish(self, keys: Tensor, params: Params | None) -> None:
        super()._finish(keys, params)
        every = self.rekey_every
        if every is not None and int(self.store.ledger.iteration) % every == 0:
            self.rekey(params)

    def rekey(self, params: Params | None = None) -> None:
        """Recompute the keys of all filled slots from their support sets (A23)."""
        if self.encoder is None or "support_x" not in self.store.notes:
            raise ConfigError("re-keying needs an encoder and rekey_every set from the start.")
        n = len(self.store)
        notes = self.store.notes
        with torch.no_grad():
            keys = self.encoder(Batch(notes["support_x"][:n], notes["support_y"][:n]), params)
        self.store.rekey(keys)
