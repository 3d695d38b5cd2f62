"""EMO: the episodic memory optimizer (Eq. 4, 6, 7; Algorithms 1 and 2).

Three verbs for a loop of one's own: `recall` what similar tasks did, `combine` it with the gradient at
hand, `remember` this task. Tasks carry a leading axis B everywhere.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.tree import check_same_structure, norms, select, tree_map
from torchemo.core.types import Batch, Params, Recall
from torchemo.memory.aggregators import Aggregator, Gated, Sum, weighted_sum
from torchemo.memory.alignment import align_heads
from torchemo.memory.consolidation import key_centres
from torchemo.memory.familiarity import Familiarity
from torchemo.memory.keys.encoder import KeyEncoder
from torchemo.memory.policy import Policy, is_remembered
from torchemo.memory.recall import Retrieval
from torchemo.memory.search import ExactIndex
from torchemo.memory.store import EpisodicMemory
from torchemo.memory.trust import Trust


class Bound(NamedTuple):
    """EMO with the recall of B tasks in hand, for an inner loop that has taken ``first`` steps before."""

    emo: "EMO"
    recall: Recall
    first: int = 0

    def direction(self, grads: Params, step: int) -> Params:
        """Eq. 7: the direction of inner step ``step``."""
        return self.emo.combine(grads, self.recall, step=self.first + step)

    def opening(self) -> Params | None:
        """Return the recall step before the first support gradient, or None."""
        return None if self.first else self.emo.opening(self.recall)


@final
class EMO(nn.Module):
    """Encoder + memory + retrieval + aggregator.

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
        memory: The slots.
        retrieval: kNN and its weights.
        aggregator: Mean, Sum, Gated or Transformer.
        encoder: Key network (Eq. 4); None if the keys come from elsewhere.
        policy: What is stored and how it is used.
        head: Names of the head tensors, for head alignment.
        norm: Names of the scales and shifts of normalisation layers, for a memory of these alone.
        familiarity: Which tasks are like those of training; others are evaluated without their recall. None
            evaluates all tasks with it.
        trust: Which slots help on classes that training has not seen; tasks that recall others are evaluated
            without their recall. None trusts all.
    """

    def __init__(
        self,
        memory: EpisodicMemory,
        retrieval: Retrieval,
        aggregator: Aggregator,
        *,
        encoder: KeyEncoder | None = None,
        policy: Policy | None = None,
        head: tuple[str, ...] = (),
        norm: tuple[str, ...] = (),
        familiarity: Familiarity | None = None,
        trust: Trust | None = None,
    ) -> None:
        super().__init__()
        self.policy = Policy() if policy is None else policy
        self.memory = memory
        self.retrieval = retrieval
        self.aggregator = aggregator
        self.encoder = encoder
        self.head = head
        self.norm = norm
        self.familiarity = familiarity
        self.trust = trust
        self._check()

    def _check(self) -> None:
        if self.encoder is not None and self.encoder.dim != self.memory.key_dim:
            raise ConfigError(
                f"the encoder makes keys of dimension {self.encoder.dim},"
                f" the memory holds keys of dimension {self.memory.key_dim}."
            )
        if self.policy.head_align != "none" and not self.head:
            raise ConfigError(
                f"head_align '{self.policy.head_align}' needs the names of the head tensors."
            )
        if self.policy.tensors == "norm" and not self.norm:
            raise ConfigError(
                "there are no normalisation layers to remember.", hint="Set tensors to 'all'."
            )
        if self.policy.scope == "group" and not isinstance(self.aggregator, Sum | Gated):
            raise ConfigError(
                "a memory per group recalls a different number of slots for every task, which only the"
                " aggregators sum and gated take.",
                hint="Set aggregator.kind to sum or gated, or memory.scope to shared.",
            )
        if self.policy.scope == "group" and not isinstance(self.retrieval.index, ExactIndex):
            raise ConfigError(
                "a memory per group is searched exactly.", hint="Set retrieval.index to exact."
            )
        if self.retrieval.min_fill > max(1, self.memory.capacity):
            raise ConfigError(
                f"min_fill {self.retrieval.min_fill} is never reached: the memory has"
                f" {self.memory.capacity} slots."
            )
        if self.consolidates and self.retrieval.max_age is not None:
            raise ConfigError(
                "max_age would switch off consolidated slots for good: they are written once.",
                hint="Leave max_age unset, or use decay of the slots.",
            )
        if self.consolidates and self.memory.value_dtype == torch.bfloat16:
            raise ConfigError(
                "consolidated slots need float32: small steps are lost in bfloat16.",
                hint="Set value_dtype to float32.",
            )
        needs = {"hungarian head alignment": self.policy.head_align == "hungarian"}
        needs["re-keying"] = self.policy.rekey_every is not None
        for what, needed in needs.items():
            if needed and self.encoder is None:
                raise ConfigError(f"{what} needs a key encoder.", hint="Pass encoder=...")

    @property
    def consolidates(self) -> bool:
        """Whether values are offsets of the start (ours) rather than gradients (the paper)."""
        return self.policy.write == "consolidate"

    # -- encode, recall ----------------------------------------------------------------------------

    def encode(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task dim"]:
        """Eq. 4: ``K = Transformer([cls, e_1, ..., e_n])[0]`` of each support set.

        Args:
            support: Support sets of B tasks.
            params: Meta-parameters, for an encoder that shares the learner's trunk.
        """
        if self.encoder is None:
            raise ConfigError("this EMO has no key encoder.", hint="Pass encoder=... or own keys.")
        with torch.set_grad_enabled(self.policy.key_gradient and torch.is_grad_enabled()):
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
            group: Which group a learner puts the tasks in; `Policy.scope` may keep groups apart.
        """
        own = self._own_notes(support, params, domain=domain, group=group)
        recall: Recall = self.retrieval(
            self.memory,
            keys,
            group=own.get("group"),
            active=self._active(keys, index),
            learn_slot_keys=self.consolidates and self.policy.slots.key_lr > 0,
        )
        if self.trust is not None and not self.training:
            active = recall.active & self.trust(recall.slots, recall.weights)
            recall = recall._replace(active=active, weights=recall.weights * active[:, None])
        if self.policy.head_align == "hungarian":
            axis = 3 if self.policy.content == "per_step" else 2
            recall = align_heads(recall, own["prototypes"], head=self.head, class_axis=axis)
        return recall._replace(own_notes=own)

    def _active(self, keys: Tensor, index: Tensor | None) -> Tensor:
        tasks = len(keys)
        if not self.training and self.familiarity is not None:
            familiar: Tensor = self.familiarity(keys)
            return familiar
        if not self.training or self.policy.recall_dropout == 0:
            return torch.ones(tasks, dtype=torch.bool)
        # Without episode numbers the draw is a function of the batch and the task's place in it.
        path = ("batch", int(self.memory.ledger.iteration)) if index is None else ("episode",)
        numbers = range(tasks) if index is None else index.tolist()
        draws = [
            torch.rand((), generator=generator_for(self.policy.seed, "recall-dropout", *path, i))
            for i in numbers
        ]
        return torch.stack(draws) >= self.policy.recall_dropout

    def _own_notes(self, support: Batch | None, params: Params | None, **tags: Any) -> Params:
        wanted = ("domain", "group") if self.policy.scope == "group" else ("domain",)
        notes = {n: tag for n, tag in tags.items() if n in wanted and tag is not None}
        if self.policy.scope == "group" and "group" not in notes:
            raise ConfigError("a memory per group needs a learner that groups tasks (tsa-maml).")
        if self.policy.head_align == "hungarian" or self.policy.rekey_every is not None:
            if support is None or self.encoder is None:
                raise ConfigError("recall: head alignment and re-keying need the support sets.")
            if self.policy.head_align == "hungarian" and self.policy.n_way is not None:
                with torch.no_grad():
                    found = self.encoder.prototypes(support, self.policy.n_way, params=params)
                notes["prototypes"] = found
            if self.policy.rekey_every is not None:
                notes["support_x"], notes["support_y"] = support.x, support.y
        return notes

    # -- use ---------------------------------------------------------------------------------------

    def bind(self, recall: Recall) -> Bound:
        """Hold a recall for an inner loop."""
        return Bound(self, recall)

    def offset(self, theta: Params, recall: Recall) -> Params:
        """Start from ``theta + sum_j a_j V_j`` when the memory consolidates; else return ``theta``.

        Args:
            theta: Per-task parameters ``{name: [B, *shape]}``.
            recall: Their recall; the weights a_j stay on the graph.
        """
        moved = self.shift(recall)
        if not moved:
            return theta
        return {name: p + moved[name] if name in moved else p for name, p in theta.items()}

    def shift(self, recall: Recall) -> Params:
        """Return ``sum_j a_j V_j`` when the memory consolidates; else nothing."""
        if not self.consolidates or recall.m == 0:
            return {}
        return {n: weighted_sum(value, recall.weights) for n, value in recall.values.items()}

    def combine(self, grads: Params, recall: Recall, *, step: int = 0) -> Params:
        """Eq. 7: return Aggr(g, V), the direction of inner step ``step``.

        Args:
            grads: Support gradients g at this step, ``{name: [B, *shape]}``.
            recall: What was recalled for the tasks, once, before the first step.
            step: Inner step s.
        """
        if self.memory.capacity == 0 or self.consolidates:
            return grads
        part = self._part(recall, grads, step)
        if part is None:
            return self.aggregator.own_only(grads)
        combined = self.aggregator(grads, part, step=step)
        if bool(recall.active.all()):
            return combined
        own = self.aggregator.own_only(grads)
        return tree_map(lambda c, o: torch.where(_column(recall.active, c), c, o), combined, own)

    def opening(self, recall: Recall) -> Params | None:
        """Return the direction of the recall step before the first support gradient, or None."""
        chosen = self.policy.recall_step
        off = chosen == "off" or (chosen == "eval_only" and self.training)
        if off or self.consolidates or recall.m == 0 or self.memory.capacity == 0:
            return None
        part = recall._replace(values=self._at_step(recall.values, 0))
        alone = self.aggregator.recall_only(part)
        return tree_map(lambda d: d * _column(recall.active, d), alone)

    def _part(self, recall: Recall, grads: Params, step: int) -> Recall | None:
        """Return the recall as used at ``step`` for the tensors in ``grads``; None if it is not."""
        use = self.policy.memory_steps
        names = [name for name in grads if name in recall.values]
        if recall.m == 0 or not names or (use == "first" and step > 0):
            return None
        values = self._at_step(select(recall.values, names), step)
        shapes = {name: grads[name].shape[1:] for name in names}
        check_same_structure(shapes, values, what="recalled gradients", leading=2)
        if isinstance(use, float):
            values = tree_map(lambda v: v * use**step, values)
        if self.policy.value_clip is not None:
            values = {n: _clip(v, grads[n], self.policy.value_clip) for n, v in values.items()}
        return recall._replace(values=values)

    def _at_step(self, values: Params, step: int) -> Params:
        if self.policy.content != "per_step":
            return values
        return tree_map(lambda v: v[:, :, min(step, v.shape[2] - 1)], values)

    # -- remember ----------------------------------------------------------------------------------

    def value(
        self,
        gradients: tuple[Params, ...] = (),
        *,
        query: Params | None = None,
        rows: Params | None = None,
        extra: Params | None = None,
    ) -> Params:
        """Pick what to remember of B tasks (`Policy.content`), detached.

        Args:
            gradients: Support gradients g_0, ..., g_{S-1} (Eq. 5, averaged over the support set).
            query: Gradient of the query loss at theta_S.
            rows: The tasks' rows of the outer gradient.
            extra: What the learner wants remembered beside them.
        """
        content = self.policy.content
        sources = {"query": query, "meta": rows}
        if content in sources:
            picked = sources[content]
        elif not gradients:
            picked = None
        elif content == "per_step":
            picked = {n: torch.stack([g[n] for g in gradients], 1) for n in gradients[0]}
        elif content == "mean":
            picked = {n: torch.stack([g[n] for g in gradients]).mean(0) for n in gradients[0]}
        else:
            picked = gradients[0 if content == "first" else -1]
        if picked is None:
            raise ConfigError(f"there is no '{content}' gradient to remember.")
        for name, value in (extra or {}).items():
            picked = {**picked, name: value[:, None] if content == "per_step" else value}
        scale = self.policy.value_scale
        return {n: v.detach() * scale for n, v in picked.items() if self._remembers(n)}

    def _remembers(self, name: str) -> bool:
        policy = self.policy
        return is_remembered(
            name, policy.head_align, policy.tensors, head=self.head, norm=self.norm
        )

    def remember(
        self,
        recall: Recall,
        values: Params,
        *,
        params: Params | None = None,
        rate_factor: float = 1.0,
    ) -> None:
        """Touch what was recalled, then write B tasks in order (Eq. 6): the memory's only change.

        Call it once per batch after the outer step; all reads of a batch precede all its writes.

        Args:
            recall: What `recall` returned for these tasks.
            values: What to remember of them, see `value`.
            params: Meta-parameters, for re-keying with an encoder that shares the learner's trunk.
            rate_factor: Multiplies the rates of consolidated slots and their keys (a schedule).
        """
        if self.memory.capacity == 0:
            return
        if self.policy.control == "random_values":
            values = self._random_like(values)
        keys, notes = recall.keys.detach(), recall.own_notes or {}
        # Checked before the first touch, so that a refused batch changes nothing at all.
        self.memory.check_write(keys, values, {} if self.consolidates else notes)
        if recall.slot_keys is not None and recall.slot_keys.grad is not None:
            self.memory.check_slot_keys(recall.slot_keys.grad, what="key gradient")
        read = _own_generations(recall)
        self.memory.touch(recall.slots[recall.active], generations=read[recall.active])
        if self.consolidates:
            self._consolidate(recall, values, rate_factor)
        else:
            self.memory.write(keys, values, notes=notes)
        self.memory.end_batch()
        self.retrieval.learn(self.memory)
        if self.familiarity is not None:
            self.familiarity.see(keys)
        every = self.policy.rekey_every
        if every is not None and int(self.memory.ledger.iteration) % every == 0:
            self.rekey(params)

    def rekey(self, params: Params | None = None) -> None:
        """Recompute the keys of all filled slots from their support sets (A23)."""
        if self.encoder is None or "support_x" not in self.memory.notes:
            raise ConfigError("re-keying needs an encoder and rekey_every set from the start.")
        n = len(self.memory)
        notes = self.memory.notes
        with torch.no_grad():
            keys = self.encoder(Batch(notes["support_x"][:n], notes["support_y"][:n]), params)
        self.memory.rekey(keys)

    def _consolidate(self, recall: Recall, rows: Params, rate_factor: float) -> None:
        far = torch.zeros(recall.keys.shape[0], dtype=torch.bool)
        if self.policy.novelty is not None:
            nearest = recall.distances[:, 0] if recall.m else torch.full((len(far),), torch.inf)
            far = nearest > self.policy.novelty
        if recall.m:
            slot_keys = recall.slot_keys
            same = self.memory.ledger.generation[recall.slots] == recall.generations
            self.memory.consolidate(
                rows,
                recall.slots,
                weights=recall.weights.detach() * (same & ~far[:, None]),
                optimizer=self.policy.slots.at(rate_factor),
                key_gradient=None if slot_keys is None else slot_keys.grad,
            )
        if bool(far.any()):
            zeros = {n: torch.zeros_like(row[far]) for n, row in rows.items()}
            self.memory.write(recall.keys[far].detach(), zeros)
        if self.policy.novelty is None and len(self.memory) == 0:
            self._warm_up(recall, rows)

    def _warm_up(self, recall: Recall, rows: Params) -> None:
        """Collect keys; after ``warmup`` batches spread the slots over the last of them."""
        memory = self.memory
        memory.warm_up(recall.keys)
        if int(memory.ledger.iteration) + 1 >= self.policy.warmup:
            centres = key_centres(memory.warm_keys, memory.capacity, seed=self.policy.seed)
            memory.seed(centres, {name: row.shape[1:] for name, row in rows.items()})

    def _random_like(self, values: Params) -> Params:
        """Replace each task's tensors by random directions of the same norm (a control)."""
        now = int(self.memory.ledger.now)
        generator = generator_for(self.policy.seed, "random-values", now)
        drawn = {}
        for name, value in values.items():
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            # In float64: the square of a large gradient that is still finite would overflow.
            size = norms({"": value.double()}) / norms({"": noise.double()})
            drawn[name] = noise * _column(size, noise).to(noise.dtype)
        return drawn


def _own_generations(recall: Recall) -> Int[Tensor, "task m"]:
    """Return the generations that were read; -1, which no slot has, where a slot is of another group."""
    group = (recall.own_notes or {}).get("group")
    if group is None or recall.notes is None or recall.m == 0:
        return recall.generations
    return recall.generations.masked_fill(recall.notes["group"] != group[:, None], -1)


def _column(flags: Tensor, like: Tensor) -> Tensor:
    return flags.view(-1, *(1,) * (like.dim() - 1))


def _clip(value: Tensor, own: Tensor, factor: float) -> Tensor:
    """Scale each recalled tensor down to at most ``factor`` times the own gradient's norm."""
    slots = value.flatten(0, 1)
    size = norms({"": slots}).clamp_min(torch.finfo(value.dtype).tiny).view(value.shape[:2])
    scale: Tensor = (factor * norms({"": own.detach()})[:, None] / size).clamp_max(1.0)
    return value * scale.view(*scale.shape, *(1,) * (value.dim() - 2))
