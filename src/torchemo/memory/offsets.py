"""OffsetMemory: slots that learn an offset of the initialisation for kinds of tasks (ours).

A task starts from ``theta + sum_j a_j V_j``. Afterwards its outer gradient, weighted by a_j, moves the slots
it recalled by an Adam step of their own (`torchemo.memory.slots`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.kmeans import centres
from torchemo.core.types import Params, Recall, TaskShape
from torchemo.memory.aggregators.parts import weighted_sum
from torchemo.memory.build import MemoryOptions, remembered_shapes
from torchemo.memory.interface import Host, TaskMemory
from torchemo.memory.recall import Retrieval
from torchemo.memory.selective import SkipUnhelpful
from torchemo.memory.slots import SlotAdam
from torchemo.memory.store import EpisodicMemory


@final
@dataclass(frozen=True)
class OffsetOptions(MemoryOptions):
    """Options of the memory of offsets."""

    steps: Literal["joint", "same"] | int = "joint"
    """Outer steps in which only the slots train, after train.steps of the learner, which is then frozen.
    same: as many as the learner had. joint: both train together."""
    slot_lr: float = 1e-3
    """Adam rate of the slots."""
    slot_decay: float = 0.0
    """Decoupled decay of the slots towards zero."""
    warmup: int = 100
    """Batches before the slots are seeded from past keys; train.steps where they train after the learner."""
    skip_unhelpful: float | None = None
    """Gain on validation tasks, such as 0, that a slot must exceed to be recalled in evaluation. Slots that
    overfit to their training classes are then skipped (ours). None uses all slots."""


@final
class OffsetMemory(TaskMemory):
    """Key network, and slots that each learn an offset of the initialisation.

    Slots are seeded after ``warmup`` batches: their keys are spread over the keys of past tasks and their
    offsets are zero. From then on every outer step moves the slots that its tasks recalled.

    Args:
        store: The slots.
        retrieval: kNN with softmax weights.
        slots: Optimizer of slots and slot keys.
        warmup: Batches before the slots are seeded.
        novelty: Distance beyond which a task claims a slot of its own; None seeds all slots at once.
        others: What all memories share, see `TaskMemory`.

    Example:
        >>> store, nearest = EpisodicMemory(2, 3), Retrieval(k=None, weights="softmax")
        >>> memory = OffsetMemory(store, nearest, warmup=1)
        >>> rows = {"w": torch.ones(4, 1)}  # per-task outer gradients of four tasks
        >>> keys = torch.nn.functional.normalize(torch.rand(4, 3), dim=1)
        >>> memory.remember(memory.recall(keys), rows)  # seeds two slots with the keys
        >>> memory.remember(memory.recall(keys), rows)  # and now they step against the gradients
        >>> bool((memory.offset(memory.recall(keys))["w"] < 0).all())
        True
    """

    title: ClassVar[str] = "offsets"
    offsets_start: ClassVar[bool] = True
    Options: ClassVar[type[OffsetOptions]] = OffsetOptions
    content = "meta"

    @classmethod
    def build(
        cls,
        options: OffsetOptions,
        host: Host,
        tasks: TaskShape,
        *,
        seed: int = 0,
        train_steps: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "OffsetMemory":
        """Make the memory from its options, for a learner on such tasks."""
        _check_options(options)
        remembered_shapes(host, cls.content, tensors=options.tensors)
        encoder, least = options.encoder(host, tasks, seed=seed), options.skip_unhelpful
        after = options.steps != "joint" and train_steps is not None
        memory = cls(
            options.store(encoder, host, dtype=dtype),
            options.retrieval(),
            slots=SlotAdam(lr=options.slot_lr, decay=options.slot_decay),
            warmup=(train_steps or 0) if after else options.warmup,
            skip_unhelpful=None if least is None else SkipUnhelpful(options.capacity, least=least),
            **options.shared(encoder, host, seed=seed),
        )
        return memory.to(dtype)

    def __init__(
        self,
        store: EpisodicMemory,
        retrieval: Retrieval,
        *,
        slots: SlotAdam | None = None,
        warmup: int = 100,
        novelty: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__(store, retrieval, **others)
        self.slots = SlotAdam() if slots is None else slots
        self.warmup = warmup
        self.novelty = novelty
        for name, number in (("warmup", warmup), ("novelty", novelty)):
            if number is not None and not number >= 0:
                raise ConfigError(f"{name} should not be negative, got {number}.")
        if retrieval.max_age is not None:
            raise ConfigError(
                "max_age would switch off slots for good: offsets are seeded once.",
                hint="Leave max_age unset, or use decay of the slots.",
            )
        if store.value_dtype == torch.bfloat16:
            raise ConfigError(
                "offsets need float32: small steps are lost in bfloat16.",
                hint="Set value_dtype to float32.",
            )

    @property
    def startup(self) -> int:
        """Until the slots are seeded."""
        return self.warmup

    @property
    def seeded_at(self) -> int | None:
        """Batch at which slots are seeded with the keys of past tasks."""
        return max(1, self.warmup)

    @property
    def wants(self) -> Literal["support", "query", "outer"]:
        """Slots learn from per-task outer gradients."""
        return "outer"

    @property
    def learns_slot_keys(self) -> bool:
        """Where their optimizer has a rate for keys."""
        return self.slots.key_lr > 0

    def offset(self, recall: Recall) -> Params:
        """Return ``sum_j a_j V_j``; the weights a_j stay on the graph."""
        if recall.m == 0:
            return {}
        return {n: weighted_sum(value, recall.weights) for n, value in recall.values.items()}

    def value(
        self,
        gradients: tuple[Params, ...] = (),
        *,
        path: tuple[Params, ...] = (),
        query: Params | None = None,
        rows: Params | None = None,
        extra: Params | None = None,
    ) -> Params:
        """Pick the per-task outer gradients of the tensors that have offsets, detached."""
        if rows is None:
            raise ConfigError("an offset memory learns from per-task outer gradients (rows=...).")
        return {n: row.detach() for n, row in rows.items() if self.remembers(n)}

    def _write(
        self, recall: Recall, values: Params, rate_factor: float, slot_key_gradient: Tensor | None
    ) -> None:
        """Step the recalled slots along the per-task gradients, or collect keys before they are seeded."""
        keys = recall.keys.detach()
        # Checked before the first touch, so that a refused batch changes nothing at all.
        self.store.check_write(keys, values, {}, slot_keys=slot_key_gradient)
        slots, used = recall.on_host()
        self.store.touch(slots[used], generations=recall.generations[used])
        far = self._far(recall)
        if recall.m:
            same = (self.store.ledger.generation[slots] == recall.generations).to(keys.device)
            self.store.step_slots(
                values,
                recall.slots,
                weights=recall.weights.detach() * (same & ~far[:, None]),
                optimizer=self.slots.at(rate_factor),
                key_gradient=slot_key_gradient,
                checked=True,
            )
        if self.novelty is not None and bool(far.any()):
            zeros = {n: torch.zeros_like(row[far]) for n, row in values.items()}
            self.store.write(keys[far], zeros)
        if self.novelty is None and len(self.store) == 0:
            self._warm_up(keys, values)

    def _far(self, recall: Recall) -> Tensor:
        """Return which tasks claim a slot of their own."""
        if self.novelty is None:
            return recall.keys.new_zeros(len(recall.keys), dtype=torch.bool)
        if not recall.m:
            return recall.keys.new_full((len(recall.keys),), torch.inf) > self.novelty
        return recall.distances[:, 0] > self.novelty

    def _warm_up(self, keys: Tensor, values: Params) -> None:
        """Collect keys; after ``warmup`` batches spread the slots over the last of them."""
        store = self.store
        store.warm_up(keys)
        if int(store.ledger.iteration) + 1 >= self.warmup:
            spread = key_centres(store.warm_keys, store.capacity, seed=self.seed)
            store.seed(spread, {name: value.shape[1:] for name, value in values.items()})


def _check_options(options: OffsetOptions) -> None:
    if options.weights != "softmax" or options.index == "approximate":
        raise ConfigError(
            f"an offset memory has few slots with learned weights, got memory.weights"
            f" '{options.weights}', memory.index '{options.index}'.",
            hint="Set memory.weights to softmax, and memory.index to exact or random.",
        )
    if options.steps != "joint" and options.recall_dropout > 0:
        raise ConfigError(
            f"a task without recall trains nothing once the learner is frozen, got"
            f" memory.recall_dropout {options.recall_dropout} with memory.steps '{options.steps}'.",
            hint="Set memory.recall_dropout to 0, or memory.steps to joint.",
        )


def key_centres(
    keys: Float[Tensor, "n dim"], slots: int, *, seed: int, restarts: int = 10
) -> Float[Tensor, "slot dim"]:
    """Spread ``slots`` unit vectors over past task keys: k-means++, best of ``restarts``.

    The centres start the slot keys after the warm-up, when the key network has learned to tell tasks
    apart; there are always ``slots`` of them.
    """
    best = centres(keys, slots, seed=seed, name="key-centres", restarts=restarts)
    return torch.nn.functional.normalize(best, dim=1).to(keys)
