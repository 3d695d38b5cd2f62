"""What EMO stores and how it uses it: the paper's open points as named switches."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, final, get_args

from torchemo.core.errors import ConfigError
from torchemo.memory.consolidation import SlotAdam

Content = Literal["first", "last", "mean", "per_step", "query", "meta"]
RecallStep = Literal["off", "eval_only", "always"]
HeadAlign = Literal["none", "drop", "hungarian"]
Tensors = Literal["all", "norm"]
Write = Literal["replace", "consolidate"]
Control = Literal["none", "random_values"]
Scope = Literal["shared", "group"]


@final
@dataclass(frozen=True)
class Policy:
    """What is stored and how it is used: the paper's open points as named switches.

    Args:
        content: What a value is (A6): the ``first``, ``last`` or ``mean`` support gradient, one
            ``per_step``, the gradient of the ``query`` loss at theta_S, or the task's own row of the outer
            gradient (``meta``).
        memory_steps: Inner steps that use the recall: ``all`` (the paper), ``first``, or a decay rho in
            (0, 1): weight rho^s at step s.
        recall_step: A step along the recall alone before the first support gradient (A4).
        head_align: What to do about the label order of head gradients (A7): ``none`` (the paper), ``drop``
            them, or match classes by prototypes (``hungarian``; needs ``n_way``).
        tensors: Which tensors are remembered: ``all``, or scale and shift of normalisation layers (``norm``).
        n_way: Number of classes of a task, for prototypes.
        recall_dropout: Probability that a meta-training task is adapted without its recall.
        value_clip: Clip a recalled tensor to this multiple of the own gradient's norm (A25).
        value_scale: Factor of stored values: N*K stores the sum over the support set (A12).
        write: ``replace`` (the paper) or ``consolidate`` (ours; values are then offsets of the start).
        slots: Optimizer of consolidated slots.
        warmup: Batches before consolidated slots are seeded from past keys.
        novelty: Distance beyond which a task claims a slot of its own instead of consolidating.
        afterwards: Share of the training that the learner has for itself; then it rests, and the slots are
            seeded and learn (`torchemo.training.trainer.Trainer`, which then sets ``warmup``). None: both
            learn at once.
        rekey_every: Recompute all stored keys every this many batches (A23); stores the support sets.
        key_gradient: Whether the outer loss may train the key network through softmax weights (A3).
        control: ``random_values`` stores random directions of the same norm instead of the values.
        scope: ``shared`` by all tasks, or a task recalls only what its own ``group`` remembers (TSA-MAML).
            The groups share the slots: the controller forgets the oldest of any.
        seed: Seed of recall dropout, of the controls and of the slot seeding.
    """

    content: Content = "first"
    memory_steps: Literal["all", "first"] | float = "first"
    recall_step: RecallStep = "off"
    head_align: HeadAlign = "none"
    tensors: Tensors = "all"
    n_way: int | None = None
    recall_dropout: float = 0.0
    value_clip: float | None = None
    value_scale: float = 1.0
    write: Write = "replace"
    slots: SlotAdam = field(default_factory=SlotAdam)
    warmup: int = 100
    novelty: float | None = None
    afterwards: float | None = None
    rekey_every: int | None = None
    key_gradient: bool = True
    control: Control = "none"
    scope: Scope = "shared"
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        self._check_pairs()

    def _check_choices(self) -> None:
        choices = {
            "content": Content,
            "recall_step": RecallStep,
            "head_align": HeadAlign,
            "tensors": Tensors,
            "write": Write,
            "control": Control,
            "scope": Scope,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(
                    f"{name} should be one of {list(get_args(allowed))},"
                    f" got '{getattr(self, name)}'."
                )

    def _check_ranges(self) -> None:
        use = self.memory_steps
        if not (0 < use < 1 if isinstance(use, float) else use in ("all", "first")):
            raise ConfigError(
                f"memory_steps should be 'all', 'first' or a decay in (0, 1), got {use!r}."
            )
        if not 0 <= self.recall_dropout <= 1:
            raise ConfigError(f"recall_dropout should lie in [0, 1], got {self.recall_dropout}.")
        if self.afterwards is not None and not 0 < self.afterwards < 1:
            raise ConfigError(
                f"afterwards is a share of the training between 0 and 1, got {self.afterwards}.",
                hint="0.5 gives the learner the first half and the slots the second.",
            )
        for name in ("n_way", "rekey_every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} should be None, or 1 or more; got {number}.")
        for name in ("value_clip", "novelty", "warmup"):
            number = getattr(self, name)
            if number is not None and not number >= 0:
                raise ConfigError(f"{name} should not be negative, got {number}.")

    def _check_pairs(self) -> None:
        if self.afterwards is not None and (
            self.write != "consolidate" or self.novelty is not None
        ):
            raise ConfigError(
                "slots that learn after the learner are consolidated, all of them seeded at once.",
                hint="Set write to 'consolidate', and leave novelty unset.",
            )
        if self.afterwards is not None and self.recall_dropout > 0:
            raise ConfigError(
                f"nothing learns from a task without recall once the learner rests, got recall_dropout"
                f" {self.recall_dropout}.",
                hint="Set recall_dropout to 0, or leave afterwards unset.",
            )
        if self.head_align == "hungarian" and self.n_way is None:
            raise ConfigError("head_align 'hungarian' needs n_way.", hint="Set n_way of the tasks.")
        if self.write == "consolidate" and self.content != "meta":
            raise ConfigError(
                f"consolidation accumulates outer gradient rows, got content '{self.content}'.",
                hint="Set content to 'meta'.",
            )
        if self.write == "consolidate" and self.scope == "group":
            raise ConfigError(
                "consolidated slots are shared by all groups: a slot is no single task.",
                hint="Set scope to 'shared' or write to 'replace'.",
            )
        if self.write == "consolidate" and (
            self.head_align == "hungarian" or self.rekey_every is not None
        ):
            raise ConfigError(
                "consolidated slots belong to no single task: they cannot be aligned or re-keyed.",
                hint="Leave rekey_every out, and set head_align to 'none' or 'drop'.",
            )


def is_remembered(
    name: str,
    head_align: HeadAlign,
    tensors: Tensors,
    *,
    head: Collection[str],
    norm: Collection[str],
) -> bool:
    """Whether a tensor of this name is remembered under these switches of `Policy`.

    Args:
        name: Name of the tensor.
        head_align: ``drop`` leaves the head out.
        tensors: ``norm`` leaves out all but the normalisation layers.
        head: Names of the head tensors.
        norm: Names of the scales and shifts of normalisation layers.
    """
    dropped = head_align == "drop" and name in head
    return not dropped and (tensors == "all" or name in norm)
