"""Retrieval: the k remembered tasks nearest to a key, and how much each of them counts."""

import math
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from torchemo.core.errors import ConfigError, DataError
from torchemo.core.tree import tree_map
from torchemo.core.types import Params, Recall
from torchemo.memory.search import ExactIndex, Following, Index
from torchemo.memory.store import EpisodicMemory


@final
class Retrieval(nn.Module):
    """k-nearest-neighbour recall with uniform or softmax weights.

    Choice: with hard neighbours and uniform weights no gradient reaches the key network (it stays at
    its initialisation for ever); ``softmax`` weights ``a = softmax(-d^2 / tau)`` let the outer loss train it.

    Args:
        k: Neighbours to recall; fewer are recalled while fewer are remembered. None recalls all slots.
        weights: ``uniform`` (the paper) or ``softmax``.
        temperature: Initial tau of the softmax; kept as its logarithm and learned.
        null_distance: With softmax weights, the distance of an extra slot that holds nothing: a task unlike
            everything remembered then gets weights that sum to less than one. None leaves it out.
        max_age: Slots written more than this many batches ago are not recalled.
        min_fill: Recall nothing before this many slots are filled.
        index: The search.
    """

    def __init__(
        self,
        k: int | None = 20,
        *,
        weights: Literal["uniform", "softmax"] = "uniform",
        temperature: float = 0.1,
        null_distance: float | None = None,
        max_age: int | None = None,
        min_fill: int = 1,
        index: Index | None = None,
    ) -> None:
        super().__init__()
        _check_retrieval(k, weights, temperature, null_distance, max_age, min_fill)
        if isinstance(index, Following) and (k is None or max_age is not None):
            raise ConfigError(
                "an approximate index needs a number of neighbours k, and no max_age."
            )
        self.k = k
        self.weights = weights
        self.max_age = max_age
        self.min_fill = min_fill
        self.index: Index = ExactIndex() if index is None else index
        self.log_temperature = self.null_logit_distance = None
        if weights == "softmax":
            self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
            if null_distance is not None:
                self.null_logit_distance = nn.Parameter(torch.tensor(float(null_distance)))

    def extra_repr(self) -> str:
        """Say what is recalled, where a memory is printed."""
        return f"k={'all' if self.k is None else self.k}, weights={self.weights}"

    def forward(
        self,
        memory: EpisodicMemory,
        keys: Float[Tensor, "task dim"],
        *,
        active: Bool[Tensor, " task"] | None = None,
        learn_slot_keys: bool = False,
        group: Int[Tensor, " task"] | None = None,
    ) -> Recall:
        """Recall the m = min(k, n) nearest slots of each key.

        Args:
            memory: The memory to read; it is not changed.
            keys: Task keys K.
            active: Tasks that may use what they recall (all by default).
            learn_slot_keys: Let the softmax weights collect a gradient for the slot keys too.
            group: Which group each task belongs to. Slots of other groups come last and count nothing:
                where a group fills fewer than m slots, the rest of its recall is zeros of weight zero.
        """
        check_keys(keys, memory.key_dim)
        if active is None:
            active = torch.ones(len(keys), dtype=torch.bool)
        slots = self._search(memory, keys.detach(), group=group)
        slot_keys = memory.keys[: len(memory)].detach()
        learns = learn_slot_keys and slots.shape[1] > 0
        if learns:
            slot_keys = slot_keys.clone().requires_grad_()
        squared = (keys[:, None] - slot_keys[slots]).square().sum(-1)
        weights, values = self._read(memory, slots, squared, group=group)
        return Recall(
            keys=keys,
            slots=slots,
            distances=squared.detach().sqrt(),
            weights=weights * active[:, None],
            values=values,
            generations=memory.ledger.generation[slots],
            active=active,
            slot_keys=slot_keys if learns else None,
            notes=memory.read_notes(slots),
        )

    def learn(self, memory: EpisodicMemory) -> None:
        """Let an index that learns how keys are spread do so; called when a batch was remembered."""
        if isinstance(self.index, Following):
            self.index.learn(memory)

    def _search(
        self, memory: EpisodicMemory, keys: Tensor, *, group: Tensor | None
    ) -> Int[Tensor, "task m"]:
        """Return the slots that each task recalls, nearest first."""
        candidates = self._candidates(memory)
        count = len(memory) if candidates is None else candidates.numel()
        m = count if self.k is None else min(self.k, count)
        if m == 0:
            return torch.zeros(len(keys), 0, dtype=torch.int64)
        slot_keys = memory.keys[: len(memory)].detach()
        if group is not None:
            # An index that follows the memory's keys knows nothing of groups: search exactly.
            near, stored = _apart(keys, slot_keys, memory, group)
            allowed = torch.arange(len(memory)) if candidates is None else candidates
            return allowed[ExactIndex().search(near, stored[allowed], m=m)]
        if candidates is None:
            # All slots: no copy of the keys, which at millions of slots costs more than the search.
            if isinstance(self.index, Following):
                self.index.follow(memory)
            return self.index.search(keys, slot_keys, m=m)
        return candidates[self.index.search(keys, slot_keys[candidates], m=m)]

    def _read(
        self, memory: EpisodicMemory, slots: Tensor, squared: Tensor, *, group: Tensor | None
    ) -> tuple[Float[Tensor, "task m"], Params]:
        """Return weights and values of slots; slots of other groups count nothing and hold zeros."""
        # In the dtype of the weights, so that keys of another precision than the memory's work.
        values = tree_map(lambda v: v.to(squared.dtype), memory.read(slots))
        if group is None or slots.shape[1] == 0:
            return self._weigh(squared), values
        same = memory.notes["group"][slots] == group[:, None]
        kept = tree_map(lambda v: v * same.view(*same.shape, *(1,) * (v.dim() - 2)), values)
        return self._weigh(squared, same=same), kept

    def _candidates(self, memory: EpisodicMemory) -> Int[Tensor, " slot"] | None:
        """Return the slots that may be recalled; None is all of them."""
        if len(memory) < self.min_fill:
            return torch.zeros(0, dtype=torch.int64)
        if self.max_age is None:
            return None
        return (memory.ages <= self.max_age).nonzero().flatten()

    def _weigh(
        self, squared: Float[Tensor, "task m"], *, same: Bool[Tensor, "task m"] | None = None
    ) -> Float[Tensor, "task m"]:
        m = squared.shape[1]
        if same is not None and self.log_temperature is None:
            return same.to(squared.dtype) / same.sum(1, keepdim=True).clamp_min(1)
        if same is not None:
            # Not infinite: a task without a single slot of its group would get 0/0.
            far = squared.masked_fill(~same, torch.finfo(squared.dtype).max / 1e6)
            return self._weigh(far) * same
        if self.log_temperature is None:
            return torch.full_like(squared.detach(), 1 / max(m, 1))
        logits = -squared / self.log_temperature.exp().to(squared.dtype)
        if self.null_logit_distance is None:
            return logits.softmax(1)
        null = -self.null_logit_distance.square() / self.log_temperature.exp()
        return torch.cat([logits, null.to(logits.dtype).expand(len(logits), 1)], 1).softmax(1)[
            :, :m
        ]


def _apart(
    keys: Tensor, slot_keys: Tensor, memory: EpisodicMemory, group: Tensor
) -> tuple[Tensor, Tensor]:
    """Give keys one more coordinate, by which groups are further apart than any two keys."""
    stored = memory.notes["group"][: len(slot_keys)]
    span = 1 + 4 * float(max(keys.abs().max(), slot_keys.abs().max())) * keys.shape[1] ** 0.5
    return (
        torch.cat([keys, span * group[:, None].to(keys.dtype)], 1),
        torch.cat([slot_keys, span * stored[:, None].to(keys.dtype)], 1),
    )


def own_generations(recall: Recall) -> Int[Tensor, "task m"]:
    """Return the generations that were read; -1, which no slot has, where a slot is of another group."""
    group = (recall.own_notes or {}).get("group")
    if group is None or recall.notes is None or recall.m == 0:
        return recall.generations
    return recall.generations.masked_fill(recall.notes["group"] != group[:, None], -1)


def check_keys(keys: Tensor, dim: int) -> None:
    """Raise `DataError` naming the task whose key has another dimension or is not finite."""
    if keys.dim() != 2 or keys.shape[1] != dim:
        raise DataError(f"task keys should have shape [tasks, {dim}], got {list(keys.shape)}.")
    bad = (~keys.detach().isfinite().all(1)).nonzero().flatten()
    if bad.numel():
        raise DataError(
            f"the key of task {int(bad[0])} is not finite.",
            hint="Look at its support set, or lower the rate of the key network.",
        )


def _check_retrieval(
    k: int | None,
    weights: str,
    temperature: float,
    null_distance: float | None,
    max_age: int | None,
    min_fill: int,
) -> None:
    if k is not None and k < 1:
        raise ConfigError(
            f"k should be 1 or more, got {k}.", hint="Set the capacity to 0 to switch memory off."
        )
    if weights not in ("uniform", "softmax"):
        raise ConfigError(f"retrieval weights should be 'uniform' or 'softmax', got '{weights}'.")
    if not temperature > 0:
        raise ConfigError(f"temperature should be above 0, got {temperature}.")
    if null_distance is not None and weights != "softmax":
        raise ConfigError("a null slot needs softmax weights.", hint="Set weights to 'softmax'.")
    if (max_age is not None and max_age < 1) or min_fill < 1:
        raise ConfigError(
            f"max_age should be None or 1 and more, min_fill 1 or more; got {max_age}, {min_fill}."
        )
