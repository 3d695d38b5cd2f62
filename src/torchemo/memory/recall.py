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
        max_distance: Slots further away than this are not used: they hold zeros of weight zero, and a task
            without a nearer one skips its recall. So k may be the largest number of visits of a task.
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
        max_distance: float | None = None,
        min_fill: int = 1,
        index: Index | None = None,
    ) -> None:
        super().__init__()
        if max_distance is not None and not max_distance >= 0:
            raise ConfigError(f"max_distance should be None, or 0 or more; got {max_distance}.")
        _check_retrieval(k, weights, temperature, null_distance, max_age, min_fill)
        if isinstance(index, Following) and (k is None or max_age is not None):
            raise ConfigError(
                "an approximate index needs a number of neighbours k, and no max_age."
            )
        self.k = k
        self.weights = weights
        self.max_age = max_age
        self.max_distance = max_distance
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
        """Recall the m = min(k, n) nearest slots of each key K; the memory is not changed.

        Args:
            memory: Slots to search.
            keys: Key of each task.
            active: Tasks that may use what they recall (all by default).
            learn_slot_keys: Let the softmax weights collect a gradient for the slot keys too.
            group: Group of each task. Slots of other groups come last, as zeros of weight zero.
        """
        slots, on_host = self._found(memory, keys, group)
        slot_keys = _slot_keys(memory, learns=learn_slot_keys and slots.shape[1] > 0)
        squared = (keys[:, None] - slot_keys[slots]).square().sum(-1)
        distances = squared.detach().sqrt()
        near = None if self.max_distance is None else distances <= self.max_distance
        active, known = _active(keys, active, near)
        used = _used(memory, slots, near, group=group)
        weights, values = self._read(memory, slots, squared, used=used)
        return Recall(
            keys=keys,
            slots=slots,
            distances=distances,
            weights=weights * active[:, None],
            values=values,
            generations=_generations(memory, on_host, near),
            active=active,
            slot_keys=slot_keys if slot_keys.requires_grad else None,
            notes=memory.read_notes(slots),
            near=near,
            host_slots=None if slots.is_cpu else on_host,
            host_active=known,
        )

    def _found(
        self, memory: EpisodicMemory, keys: Tensor, group: Tensor | None
    ) -> tuple[Int[Tensor, "task m"], Int[Tensor, "task m"]]:
        """Return the slots that each task recalls, and the same on the host."""
        check_keys(keys, memory.key_dim)
        slots = self._search(memory, keys.detach(), group=group)
        return slots, _fetched(keys, slots)

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
            return keys.new_zeros(len(keys), 0, dtype=torch.int64)
        slot_keys = memory.keys[: len(memory)].detach()
        if group is not None:
            # An index that follows the memory's keys knows nothing of groups: search exactly.
            near, stored = _apart(keys, slot_keys, memory, group)
            allowed = (
                torch.arange(len(memory), device=keys.device) if candidates is None else candidates
            )
            return allowed[ExactIndex().search(near, stored[allowed], m=m)]
        if candidates is None:
            # All slots: no copy of the keys, which at millions of slots costs more than the search.
            if isinstance(self.index, Following):
                self.index.follow(memory)
            return self.index.search(keys, slot_keys, m=m)
        return candidates[self.index.search(keys, slot_keys[candidates], m=m)]

    def _read(
        self, memory: EpisodicMemory, slots: Tensor, squared: Tensor, *, used: Tensor | None
    ) -> tuple[Float[Tensor, "task m"], Params]:
        """Return weights and values of slots; those that are not used count nothing and hold zeros."""
        # In the dtype of the weights, so that keys of another precision than the memory's work.
        values = tree_map(lambda v: v.to(squared.dtype), memory.read(slots))
        if used is None or slots.shape[1] == 0:
            return self._weigh(squared), values
        kept = tree_map(lambda v: v * used.view(*used.shape, *(1,) * (v.dim() - 2)), values)
        return self._weigh(squared, same=used), kept

    def _candidates(self, memory: EpisodicMemory) -> Int[Tensor, " slot"] | None:
        """Return the slots that may be recalled; None is all of them."""
        if len(memory) < self.min_fill:
            return torch.zeros(0, dtype=torch.int64, device=memory.keys.device)
        if self.max_age is None:
            return None
        return (memory.ages <= self.max_age).nonzero().flatten().to(memory.keys.device)

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


def _active(
    keys: Tensor, given: Bool[Tensor, " task"] | None, near: Bool[Tensor, "task m"] | None
) -> tuple[Bool[Tensor, " task"], Bool[Tensor, " task"] | None]:
    """Return which tasks may use their recall, and the same on the host where nobody has to ask."""
    known = torch.ones(len(keys), dtype=torch.bool, device="cpu") if given is None else given
    active = known.to(keys.device)
    if near is not None:
        return active & near.any(1), None
    return active, known if known.is_cpu and not active.is_cpu else None


def _generations(memory: EpisodicMemory, slots: Tensor, near: Tensor | None) -> Tensor:
    """Return the generations of slots; -1, which no slot has, where one is not used, so not touched."""
    read = memory.ledger.generation[slots]
    return read if near is None else read.masked_fill(~near.cpu(), -1)


def _slot_keys(memory: EpisodicMemory, *, learns: bool) -> Float[Tensor, "slot dim"]:
    """Return the keys of the slots, as a leaf that collects a gradient where they learn."""
    slot_keys = memory.keys[: len(memory)].detach()
    return slot_keys.clone().requires_grad_() if learns else slot_keys


def _used(
    memory: EpisodicMemory, slots: Tensor, near: Tensor | None, *, group: Tensor | None
) -> Bool[Tensor, "task m"] | None:
    """Return which slots are near enough and of the task's group; None if all may be used."""
    if group is None or slots.shape[1] == 0:
        return near
    same = memory.notes["group"][slots] == group[:, None]
    return same if near is None else same & near


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
    return recall.generations.masked_fill((recall.notes["group"] != group[:, None]).cpu(), -1)


def check_keys(keys: Tensor, dim: int) -> None:
    """Raise `DataError` naming the task whose key has another dimension or is not finite."""
    if keys.dim() != 2 or keys.shape[1] != dim:
        raise DataError(f"task keys should have shape [tasks, {dim}], got {list(keys.shape)}.")
    if keys.is_cpu:
        _refuse_keys(keys.detach().isfinite().all(1))


def _refuse_keys(finite: Bool[Tensor, " task"]) -> None:
    bad = (~finite).nonzero().flatten()
    if bad.numel():
        raise DataError(
            f"the key of task {int(bad[0])} is not finite.",
            hint="Look at its support set, or lower the rate of the key network.",
        )


def _fetched(keys: Tensor, slots: Int[Tensor, "task m"]) -> Int[Tensor, "task m"]:
    """Return slots on the host; on the same way from a device, refuse keys that are not finite."""
    if slots.is_cpu:
        return slots
    finite = keys.detach().isfinite().all(1)
    both = torch.cat([finite[:, None].to(slots.dtype), slots], 1).cpu()
    _refuse_keys(both[:, 0].bool())
    return both[:, 1:]


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
