"""What a training loop may ask of a memory of tasks: encode, recall, offset, combine, remember."""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.tree import norms
from torchemo.core.types import Batch, Model, Params, Recall
from torchemo.memory.alignment import resize_heads
from torchemo.memory.bound import BoundMemory
from torchemo.memory.keys.encoder import KeyEncoder
from torchemo.memory.recall import Retrieval
from torchemo.memory.selective import SkipUnfamiliar, SkipUnhelpful
from torchemo.memory.store import EpisodicMemory
from torchemo.memory.values import leading_axes


class Host(NamedTuple):
    """A learner as its memory sees it.

    Attributes:
        title: Its name.
        model: Its network.
        steps: Inner steps while training.
        inner_loop: Whether it takes gradient steps that a memory of gradients can join.
        adapted: Tensors of the network that inner steps move.
        remembered: Content of a memory -> names and shapes of what is remembered of a task.
        key_dim: Size of its own description of a task, if it has one that may serve as a key.
        groups: Whether it puts tasks into groups.
        differentiable: Whether its outer gradient can train an aggregator.
    """

    title: str
    model: Model
    steps: int
    inner_loop: bool
    adapted: tuple[str, ...]
    remembered: Callable[[str], dict[str, torch.Size]]
    key_dim: int | None
    groups: bool
    differentiable: bool


class TaskMemory(nn.Module):
    """Key network, slots and search: what all memories of tasks share.

    Args:
        store: The slots.
        retrieval: kNN and its weights.
        encoder: Key network (Eq. 4); None if the keys come from elsewhere.
        head: Names of the head tensors.
        norm: Names of the scales and shifts of normalisation layers, for a memory of these alone.
        tensors: Which tensors are remembered: ``all``, or scale and shift of normalisation layers (``norm``).
        drop_head: Remember no tensor of the head.
        recall_dropout: Probability that a meta-training task is adapted without its recall.
        control: ``random_values`` stores random directions of the same norm instead of the values.
        train_keys: Whether the outer loss may train the key network through softmax weights (A3).
        skip_unfamiliar: Evaluates tasks unlike those of training without recall; None recalls for all.
        skip_unhelpful: Evaluates tasks without recall if their slots failed validation; None uses all slots.
        seed: Seed of recall dropout, of the controls and of the slot seeding.
    """

    title: ClassVar[str] = ""
    """How a method with this memory is called in tables: MAML + EMO."""
    offsets_start: ClassVar[bool] = False
    """Whether recalled values are added to the start of a task, before any gate of the learner."""
    content: str
    """What a value is, see `torchemo.memory.emo.EMO`."""
    classes: int | None = None
    """Classes of the tasks that read this memory, where they are not as many as in training."""
    keeps_rows: bool = False
    """Whether their first classes then take recalled head rows as they are, and not the mean of all."""

    def __init__(
        self,
        store: EpisodicMemory,
        retrieval: Retrieval,
        *,
        encoder: KeyEncoder | None = None,
        head: tuple[str, ...] = (),
        norm: tuple[str, ...] = (),
        tensors: Literal["all", "norm"] = "all",
        drop_head: bool = False,
        recall_dropout: float = 0.0,
        control: Literal["none", "random_values"] = "none",
        train_keys: bool = True,
        skip_unfamiliar: SkipUnfamiliar | None = None,
        skip_unhelpful: SkipUnhelpful | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.store = store
        self.retrieval = retrieval
        # Checkpoints number parameters in order: an aggregator comes before the key network.
        self.register_module("aggregator", None)
        self.encoder = encoder
        self.head = head
        self.norm = norm
        self.tensors = tensors
        self.drop_head = drop_head
        self.recall_dropout = recall_dropout
        self.control = control
        self.train_keys = train_keys
        self.skip_unfamiliar = skip_unfamiliar
        self.skip_unhelpful = skip_unhelpful
        self.seed = seed
        self._check_parts()

    def _check_parts(self) -> None:
        if self.encoder is not None and self.encoder.dim != self.store.key_dim:
            raise ConfigError(
                f"the encoder makes keys of dimension {self.encoder.dim},"
                f" the memory holds keys of dimension {self.store.key_dim}."
            )
        if self.retrieval.min_fill > max(1, self.store.capacity):
            raise ConfigError(
                f"min_fill {self.retrieval.min_fill} is never reached: the memory has"
                f" {self.store.capacity} slots."
            )
        if not 0 <= self.recall_dropout <= 1:
            raise ConfigError(f"recall_dropout should lie in [0, 1], got {self.recall_dropout}.")
        check_choice("tensors", self.tensors, ("all", "norm"))
        check_choice("control", self.control, ("none", "random_values"))
        if self.tensors == "norm" and not self.norm:
            raise ConfigError(
                "there are no normalisation layers to remember.",
                hint="Set memory.tensors to 'all'.",
            )

    # -- what a memory of a kind says --------------------------------------------------------------

    @property
    @abstractmethod
    def wants(self) -> Literal["support", "query", "outer"]:
        """Which gradients of a task `value` needs."""

    @property
    def keeps_support(self) -> bool:
        """Whether slots hold the support sets of their tasks."""
        return False

    @property
    def keeps_prototypes(self) -> bool:
        """Whether slots hold the class prototypes of their tasks."""
        return False

    @property
    def learns_slot_keys(self) -> bool:
        """Whether the outer loss trains the keys of the slots."""
        return False

    @property
    def startup(self) -> int:
        """Batches in which keys that recognise their own task train at every step, not less often."""
        return 100

    @property
    def seeded_at(self) -> int | None:
        """Batch at which slots are seeded with the keys of past tasks; None if they never are."""
        return None

    def inner_parameters(self) -> dict[str, nn.Parameter]:
        """Return what inner steps use and the outer loss trains, by name: the aggregator's parameters."""
        return {}

    @abstractmethod
    def value(
        self,
        gradients: tuple[Params, ...] = (),
        *,
        path: tuple[Params, ...] = (),
        query: Params | None = None,
        rows: Params | None = None,
        extra: Params | None = None,
    ) -> Params:
        """Pick what to remember of B tasks, detached.

        Args:
            gradients: Support gradients g_0, ..., g_{S-1} (Eq. 5, averaged over the support set).
            path: Parameters theta_0, ..., theta_S of the inner loop.
            query: Gradient of the query loss at theta_S.
            rows: Per-task outer gradients.
            extra: What the learner wants remembered beside them.
        """

    def remember(
        self,
        recall: Recall,
        values: Params,
        *,
        params: Params | None = None,
        rate_factor: float = 1.0,
        slot_key_gradient: Tensor | None = None,
    ) -> None:
        """Touch what was recalled, then change the slots: the memory's only change.

        Call it once per batch after the outer step; all reads of a batch precede all its writes.

        Args:
            recall: What `recall` returned for these tasks.
            values: What to remember of them, see `value`.
            params: Meta-parameters, for re-keying with an encoder that shares the learner's trunk.
            rate_factor: Multiplies the rates of slots that learn (a schedule).
            slot_key_gradient: Gradient of the outer loss in the keys of the filled slots, if they learn.
        """
        if self.store.capacity > 0:
            self._write(recall, self._controlled(values), rate_factor, slot_key_gradient)
            self._finish(recall.keys.detach(), params)

    @abstractmethod
    def _write(
        self, recall: Recall, values: Params, rate_factor: float, slot_key_gradient: Tensor | None
    ) -> None:
        """Change the slots; a refused batch changes nothing. See `remember`."""

    def offset(self, recall: Recall) -> Params:
        """Return what the memory adds to the start of each task; a memory of gradients adds nothing."""
        return {}

    def combine(
        self, grads: Params, recall: Recall, *, step: int = 0, theta: Params | None = None
    ) -> Params:
        """Return the direction of inner step ``step`` (Eq. 7); a memory of offsets leaves it as it is."""
        return grads

    def opening(self, recall: Recall) -> Params | None:
        """Return the direction of a step before the first support gradient, or None."""
        return None

    def bind(self, recall: Recall) -> BoundMemory | None:
        """Hold a recall for an inner loop; None if this memory does not join inner steps."""
        return None

    @property
    def may_skip(self) -> bool:
        """Whether tasks may skip their recall in evaluation."""
        return self.skip_unfamiliar is not None or self.skip_unhelpful is not None

    @property
    def failed_slots(self) -> list[int] | None:
        """Slots that failed validation; None where slots are not judged."""
        rule = self.skip_unhelpful
        return None if rule is None else rule.failed.nonzero().flatten().tolist()

    # -- encode, recall ----------------------------------------------------------------------------

    def encode(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task dim"]:
        """Return the key of each support set (Eq. 4).

        Args:
            support: Support sets of B tasks.
            params: Meta-parameters, for an encoder that shares the learner's trunk.
        """
        if self.encoder is None:
            raise ConfigError(
                "this memory has no key encoder.", hint="Pass encoder=... or own keys."
            )
        with torch.set_grad_enabled(self.train_keys and torch.is_grad_enabled()):
            return self.encoder(support, params)

    def recall(
        self,
        keys: Float[Tensor, "task dim"],
        *,
        support: Batch | None = None,
        params: Params | None = None,
        domain: Int[Tensor, " task"] | None = None,
        index: Int[Tensor, " task"] | None = None,
        group: Int[Tensor, " task"] | None = None,
    ) -> Recall:
        """Recall what is remembered of the k nearest tasks; changes nothing.

        Args:
            keys: Task keys.
            support: Support sets, needed for head alignment and re-keying only.
            params: Meta-parameters, for an encoder that shares the learner's trunk.
            domain: Tags to remember with the tasks, for analysis.
            index: Episode numbers; recall dropout is a function of them.
            group: Which group a learner puts the tasks in.
        """
        tags = {"domain": domain if domain is None else domain.to(keys.device), "group": group}
        own = self._own_notes(support, params, **tags)
        found = self.retrieval(
            self.store,
            keys,
            group=own.get("group"),
            active=self._drawn(len(keys), index),
            learn_slot_keys=self.learns_slot_keys,
        )
        aligned = self._aligned(self._skipping(found), own)._replace(own_notes=own)
        if self.classes is None:
            return aligned
        axis = 2 + leading_axes(self.content)
        keep = self.keeps_rows
        return resize_heads(aligned, self.classes, head=self.head, class_axis=axis, keep=keep)

    def _own_notes(
        self, support: Batch | None, params: Params | None, **tags: Tensor | None
    ) -> Params:
        """Return what to remember with B tasks beside their values."""
        return {n: tag for n, tag in tags.items() if n == "domain" and tag is not None}

    def _aligned(self, recall: Recall, own: Params) -> Recall:
        """Return recalled values in the label order of the tasks with these notes."""
        return recall

    def _skipping(self, recall: Recall) -> Recall:
        """Let tasks skip their recall in evaluation, where a rule says so."""
        rules = [r for r in (self.skip_unfamiliar, self.skip_unhelpful) if r is not None]
        if self.training or not rules:
            return recall
        active = recall.active
        for rule in rules:
            active = active & rule.allows(recall)
        return recall._replace(
            active=active, host_active=None, weights=recall.weights * active[:, None]
        )

    def _drawn(self, tasks: int, index: Tensor | None) -> Bool[Tensor, " task"]:
        """Draw which tasks of training use their recall (recall dropout)."""
        if not self.training or self.recall_dropout == 0:
            return torch.ones(tasks, dtype=torch.bool, device="cpu")
        # Without episode numbers the draw is a function of the batch and the task's place in it.
        path = ("batch", int(self.store.ledger.iteration)) if index is None else ("episode",)
        numbers = range(tasks) if index is None else index.tolist()
        seeded = (generator_for(self.seed, "recall-dropout", *path, i) for i in numbers)
        draws = [torch.rand((), generator=generator) for generator in seeded]
        return torch.stack(draws) >= self.recall_dropout

    # -- remember ----------------------------------------------------------------------------------

    def remembers(self, name: str) -> bool:
        """Return whether a tensor of this name is remembered."""
        return remembers(
            name, tensors=self.tensors, drop_head=self.drop_head, head=self.head, norm=self.norm
        )

    def _finish(self, keys: Tensor, params: Params | None) -> None:
        """Close a batch: count it, and let search and skipping learn from its keys."""
        self.store.end_batch()
        self.retrieval.learn(self.store)
        if self.skip_unfamiliar is not None:
            self.skip_unfamiliar.see(keys)

    def _controlled(self, values: Params) -> Params:
        """Replace each task's tensors by random directions of the same norm, if this is such a control."""
        if self.control == "none":
            return values
        generator = generator_for(self.seed, "random-values", int(self.store.ledger.now))
        drawn = {}
        for name, value in values.items():
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            # In float64: the square of a large gradient that is still finite would overflow.
            size = norms({"": value.cpu().double()}) / norms({"": noise.double()})
            drawn[name] = (noise * column(size, noise).to(noise.dtype)).to(value.device)
        return drawn


def remembers(
    name: str, *, tensors: str, drop_head: bool, head: tuple[str, ...], norm: tuple[str, ...]
) -> bool:
    """Return whether a memory with these choices remembers a tensor of this name."""
    return not (drop_head and name in head) and (tensors == "all" or name in norm)


def column(flags: Tensor, like: Tensor) -> Tensor:
    """Give one number per task the axes of ``like``."""
    return flags.view(-1, *(1,) * (like.dim() - 1))


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise `ConfigError` if an option has a value that it does not know."""
    if value not in allowed:
        raise ConfigError(f"{name} should be one of {list(allowed)}, got '{value}'.")


OLD_NAMES = {
    "memory.": "store.",
    "familiarity.": "skip_unfamiliar.",
    "trust.doubted": "skip_unhelpful.failed",
}
"""How parts of a memory were named in checkpoints before they got the names of the present."""


def current_names(state: Params) -> Params:
    """Return a saved state with the names that parts of a memory have today."""
    found = {}
    for name, tensor in state.items():
        old = next((old for old in OLD_NAMES if name.startswith(old)), None)
        found[name if old is None else OLD_NAMES[old] + name.removeprefix(old)] = tensor
    return found
