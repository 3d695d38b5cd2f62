"""Self-recognition: train the key network to know a task again from other images of it.

Hard kNN passes no gradient to the keys: "trained end to end" leaves the key network at its random
start (A3). Here keys learn on their own: the key of a support set should be near the key of the
query set of the same task, and far from those of other tasks (InfoNCE).
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import CheckpointError, ConfigError, DataError, ShapeError
from torchemo.core.losses import check_labels
from torchemo.core.types import Batch, Episode, Params
from torchemo.memory.keys.encoder import KeyEncoder, Summarizing

PAUSE = 16
"""Outer steps from one training of a key network that reads images to the next, after the start-up."""

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def self_recognition_loss(
    support_keys: Float[Tensor, "task dim"],
    query_keys: Float[Tensor, "task dim"],
    negatives: Float[Tensor, "older dim"] | None = None,
    *,
    temperature: float = 0.1,
) -> Float[Tensor, ""]:
    """Return the InfoNCE loss, the mean over tasks b of ``-log softmax_b(K_b . C / temperature)``.

    Args:
        support_keys: K_b, unit vectors.
        query_keys: Keys of the query sets: the b-th is the positive of task b, the others its
            negatives. They come first in C.
        negatives: Keys of older support sets, the rest of C.
        temperature: Small values look at the hardest negatives only.
    """
    candidates = query_keys if negatives is None else torch.cat([query_keys, negatives])
    own = torch.arange(len(support_keys), device=support_keys.device)
    return F.cross_entropy(support_keys @ candidates.T / temperature, own)


def query_as_support(query: Batch, n_way: int | None = None) -> Batch:
    """Make a support set out of a query set: the first query of each class, in label order.

    Args:
        query: Query sets ``x [B, n, ...]``, ``y [B, n]``.
        n_way: Number of classes; None for regression, where the whole query set is taken.
    """
    if n_way is None:
        return query
    if query.y.is_cpu:
        check_labels(query.y, n_way, what="query labels")
    labels = torch.arange(n_way, device=query.y.device)
    member = query.y[:, None] == labels[:, None]
    if query.y.is_cpu and not member.any(-1).all():
        b, c = (~member.any(-1)).nonzero()[0].tolist()
        raise DataError(
            f"query set of task {b}: class {c} has no image.",
            hint="Self-recognition needs at least one query of every class.",
        )
    first = member.to(torch.uint8).argmax(-1)
    x = query.x[torch.arange(len(first), device=first.device)[:, None], first]
    return Batch(x, labels.to(query.y.dtype).expand(len(first), n_way))


@final
class SelfRecognition:
    """Train a key network by `self_recognition_loss`, with its own Adam.

    The negatives are the other tasks of the batch and the last ``older`` support sets. These are
    kept as inputs (or what the network's weights see of them, `Summarizing`) and encoded anew, with
    gradients, at every step: beside stored keys, which belong to an older network, or constant ones, the
    new keys collapse into one cluster.

    Args:
        encoder: The key network; its trainable weights are updated in place.
        n_way: Number of classes of a task; None for regression.
        lr: Rate of Adam.
        older: How many support sets to keep.
        temperature: Of the loss.
        every: After the start-up, the outer steps from one training of the keys to the next. None: one where
            the network is `Summarizing`; else `PAUSE`, as encoding all older support sets with gradients
            takes about half as long as a second-order step.
        settled: Share of their pace that the keys keep once slots are found by them.
    """

    def __init__(
        self,
        encoder: KeyEncoder,
        *,
        n_way: int | None = None,
        lr: float = 1e-3,
        older: int = 48,
        temperature: float = 0.1,
        every: int | None = None,
        settled: float = 0.2,
    ) -> None:
        self._weights = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
        if not self._weights or older < 0 or temperature <= 0:
            raise ConfigError(
                f"self-recognition: {len(self._weights)} trainable tensors in the key network,"
                f" older={older}, temperature={temperature}.",
                hint="It needs weights to train, older >= 0 and a temperature above 0.",
            )
        if every is not None and every < 1:
            raise ConfigError(f"every should be None or 1 and more, got {every}.")
        self.every = every or (1 if isinstance(encoder, Summarizing) else PAUSE)
        self.encoder = encoder
        self.settled = settled
        self.n_way = n_way
        self.older = older
        self.temperature = temperature
        self._adam = torch.optim.Adam(self._weights.values(), lr=lr)
        self._ring: Batch | None = None
        self._pushed = 0

    @property
    def lr(self) -> float:
        """The present rate of Adam."""
        return float(self._adam.param_groups[0]["lr"])

    @property
    def queue(self) -> Batch | None:
        """The support sets that serve as negatives, or their summaries, at most ``older`` of them."""
        if self._ring is None:
            return None
        filled = min(self._pushed, self.older)
        return Batch(self._ring.x[:filled], self._ring.y[:filled])

    def settle(self) -> None:
        """Slow the keys down once slots are found by them: pauses between trainings do so as well."""
        self._adam.param_groups[0]["lr"] *= min(1.0, self.settled * self.every)

    def loss(self, episode: Episode, params: Params | None = None) -> Tensor:
        """Return the loss of a batch of tasks, on the graph of the key network.

        For those who add it to an outer loss of their own; they then `push` the support sets.
        """
        return self._loss(self._kept(episode.support), episode.query, params)

    def _loss(self, kept: Batch, query: Batch, params: Params | None) -> Tensor:
        queue, again = self.queue, self._kept(query_as_support(query, self.n_way))
        return self_recognition_loss(
            self._keys(kept, params),
            self._keys(again, params),
            None if queue is None else self._keys(queue, params),
            temperature=self.temperature,
        )

    def _kept(self, support: Batch) -> Batch:
        """Return what is kept of support sets: all that their keys depend on but weights."""
        if isinstance(self.encoder, Summarizing):
            return Batch(self.encoder.summary(support), support.y)
        return support

    def _keys(self, kept: Batch, params: Params | None) -> Tensor:
        if isinstance(self.encoder, Summarizing):
            return self.encoder.of_summary(kept.x)
        return self.encoder(kept, params)

    def step(
        self, episode: Episode, params: Params | None = None, *, rate_factor: float = 1.0
    ) -> float:
        """Train on a batch of tasks and keep its support sets; return the loss it had before."""
        return float(self.train(episode, params, rate_factor=rate_factor))

    def train(
        self, episode: Episode, params: Params | None = None, *, rate_factor: float = 1.0
    ) -> Tensor:
        """Do what `step` does, without waiting for the loss."""
        kept = self._kept(episode.support)
        self._check_fits(kept)
        weights = list(self._weights.values())
        loss = self._loss(kept, episode.query, params)
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        # The outer loop may be collecting gradients in the same fields.
        others = [p.grad for p in weights]
        _set_gradients(weights, gradients)
        lr = self.lr
        self._adam.param_groups[0]["lr"] = lr * rate_factor
        self._adam.step()
        self._adam.param_groups[0]["lr"] = lr
        _set_gradients(weights, others)
        self._push(kept)
        return loss.detach()

    def push(self, support: Batch) -> None:
        """Keep the support sets of B tasks in place of the oldest ones."""
        kept = self._kept(support)
        self._check_fits(kept)
        self._push(kept)

    def _push(self, kept: Batch) -> None:
        if self.older == 0:
            return
        if self._ring is None:
            self._ring = Batch(*(t.new_zeros(self.older, *t.shape[1:]) for t in kept))
        tasks = kept.x.shape[0]
        last = torch.arange(max(0, tasks - self.older), tasks, device=kept.x.device)
        for ring, values in zip(self._ring, kept, strict=True):
            ring[(self._pushed + last) % self.older] = values[last].detach()
        self._pushed += tasks

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that a bitwise resume needs beside the weights of the key network."""
        state = {
            "pushed": torch.tensor(self._pushed, device="cpu"),
            "lr": torch.tensor(self.lr, dtype=torch.float64, device="cpu"),
        }
        if self._ring is not None:
            state |= {"queue.x": self._ring.x.clone(), "queue.y": self._ring.y.clone()}
        for name, p in self._weights.items():
            moments = self._adam.state.get(p, {})
            state |= {f"adam.{m}.{name}": moments[m].clone() for m in _MOMENTS if m in moments}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a saved state; refuse, unchanged, one that belongs to something else."""
        self._check_state(state)
        self._pushed = int(state["pushed"])
        self._adam.param_groups[0]["lr"] = float(state["lr"])
        self._ring = None
        if "queue.x" in state:
            home = next(iter(self._weights.values())).device
            self._ring = Batch(*(state[n].to(home, copy=True) for n in ("queue.x", "queue.y")))
        self._adam.state.clear()
        for name, p in self._weights.items():
            if f"adam.step.{name}" in state:
                saved = {m: state[f"adam.{m}.{name}"] for m in _MOMENTS}
                # Adam counts its steps on the host.
                homes = {m: torch.device("cpu") if m == "step" else p.device for m in saved}
                self._adam.state[p] = {m: t.to(homes[m], copy=True) for m, t in saved.items()}

    def _check_fits(self, support: Batch) -> None:
        for ring, values in zip(self._ring or (), support, strict=False):
            if ring.shape[1:] != values.shape[1:]:
                raise ShapeError(
                    f"self-recognition: support sets of shape {list(values.shape[1:])} beside older"
                    f" ones of shape {list(ring.shape[1:])}.",
                    hint="Use one n_way, one n_shot and one image size throughout a run.",
                )

    def _check_state(self, state: dict[str, Tensor]) -> None:
        shapes = {"pushed": torch.Size(), "lr": torch.Size()}
        for name, p in self._weights.items():
            if any(f"adam.{m}.{name}" in state for m in _MOMENTS):
                shapes |= {f"adam.step.{name}": torch.Size()}
                shapes |= {f"adam.{m}.{name}": p.shape for m in _MOMENTS[1:]}
        if (
            state.get("pushed", torch.zeros((), device="cpu")).any()
            or "queue.x" in state
            or "queue.y" in state
        ):
            ring = {
                part: state.get(part, torch.empty(0, device="cpu")).shape
                for part in ("queue.x", "queue.y")
            }
            shapes |= {part: torch.Size([self.older, *shape[1:]]) for part, shape in ring.items()}
        got = {name: value.shape for name, value in state.items()}
        wrong = sorted(n for n in shapes.keys() | got.keys() if shapes.get(n) != got.get(n))
        if wrong:
            raise CheckpointError(
                f"state of self-recognition: '{wrong[0]}' should have shape"
                f" {shapes.get(wrong[0])}, got {got.get(wrong[0])}.",
                hint="Resume with the same key network and the same number of older sets.",
            )


def _set_gradients(weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for p, gradient in zip(weights, gradients, strict=True):
        p.grad = gradient
