"""Processes that share the tasks of an outer step: each solves some, and all hold all results in task order.

A rank is a task worker in another process. What comes before the tasks (starts, keys, recall) and after them
(means, optimizers, memory) is computed by every rank from equal numbers, so replicas stay equal bit for bit
and nothing but results of tasks is sent.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from torchemo.core.errors import ConfigError, ResourceError, TorchemoError

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = "TORCHEMO_RANK_TIMEOUT"
"""Seconds after which a rank that does not answer is given up; 600 where this variable is not set."""


class Team(Protocol):
    """The processes that train one run."""

    @property
    def rank(self) -> int:
        """Number of this process; 0 leads: it writes and speaks."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def share(self, work: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> list[R]:
        """Work on a block of the items in each process, and return the results of all, in their order.

        Args:
            work: What to do with a block; may be empty. An error of one process is raised in all.
            items: The same in every process.
        """
        ...

    def together(self, work: Callable[[], R]) -> R:
        """Do the same in every process; an error of one is raised in all."""
        ...

    def first(self, work: Callable[[], R]) -> R:
        """Do something in the leading process and return there and elsewhere what it returned."""
        ...

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in any process."""
        ...

    def agree(self, what: str, value: object) -> None:
        """Raise `ResourceError` in all processes unless they all have the same value."""
        ...


@final
class Alone:
    """One process.

    Example:
        >>> Alone().share(lambda items: [2 * i for i in items], [1, 2, 3])
        [2, 4, 6]
    """

    rank, size = 0, 1

    def share(self, work: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> list[R]:
        """Work on all items."""
        return list(work(items))

    def together(self, work: Callable[[], R]) -> R:
        """Do it."""
        return work()

    def first(self, work: Callable[[], R]) -> R:
        """Do it."""
        return work()

    def any(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def agree(self, what: str, value: object) -> None:
        """Agree with nobody."""


ALONE = Alone()


class _Hole(NamedTuple):
    """Where a tensor was in a structure."""

    dtype: torch.dtype
    shape: torch.Size


class _Failed(NamedTuple):
    """An error of one process, as the others raise it."""

    kind: type[TorchemoError] | None
    message: str
    hint: str | None


@final
class Ranks:
    """The processes of the default group of ``torch.distributed``.

    Args:
        device: Where the tensors that are sent lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device

    def share(self, work: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> list[R]:
        """Work on this rank's block of the items; see `Team.share`."""
        mine: Sequence[R] = ()
        error: Exception | None = None
        try:
            mine = work(items[self._block(len(items))])
        except Exception as failed:
            error = failed
        return self._gather(mine, error)

    def together(self, work: Callable[[], R]) -> R:
        """Do the same everywhere; see `Team.together`."""
        found: list[R] = []
        error: Exception | None = None
        try:
            found.append(work())
        except Exception as failed:
            error = failed
        self._exchange(None, error)
        return found[0]

    def first(self, work: Callable[[], R]) -> R:
        """Do it in rank 0; see `Team.first`."""
        found: R | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                found = work()
            except Exception as failed:
                error = failed
        return cast(R, self._exchange(found, error)[0])

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in any rank."""
        return any(self._exchange(flag, None))

    def agree(self, what: str, value: object) -> None:
        """Refuse to go on with ranks that differ."""
        for rank, other in enumerate(values := self._exchange(value, None)):
            if other != values[0]:
                raise _shared(
                    ResourceError(
                        f"ranks differ in {what}: rank 0 has {values[0]}, rank {rank} has {other}.",
                        hint="Give every rank the same data, the same versions and the same kind of machine.",
                    )
                )

    def _block(self, count: int) -> slice:
        """Return the items of this rank; the first ranks take one more where they do not come out even."""
        small, more = divmod(count, self.size)
        first = self.rank * small + min(self.rank, more)
        return slice(first, first + small + (self.rank < more))

    def _gather(self, mine: Sequence[R], error: Exception | None) -> list[R]:
        """Return the results of all ranks, one after another; tensors are sent end to end, by type."""
        plain = tree_map_only(Tensor, lambda t: _Hole(t.dtype, t.shape), list(mine))
        structures = self._exchange(plain, error)
        leaves = [tree_flatten(one, is_leaf=_is_hole) for one in structures]
        holes = [[x for x in flat if _is_hole(x)] for flat, _ in leaves]
        own = [x.detach() for x in tree_flatten(list(mine))[0] if isinstance(x, Tensor)]
        filled: list[dict[int, Tensor]] = [{} for _ in holes]
        for dtype in sorted({hole.dtype for rank in holes for hole in rank}, key=str):
            rows = self._rows(dtype, [t for t in own if t.dtype == dtype], holes)
            for rank, row in enumerate(rows):
                _fill(filled[rank], row, holes[rank], dtype)
        found: list[R] = []
        for (flat, spec), tensors in zip(leaves, filled, strict=True):
            ordered = iter([tensors[i] for i in sorted(tensors)])
            found += tree_unflatten([next(ordered) if _is_hole(x) else x for x in flat], spec)
        return found

    def _rows(self, dtype: torch.dtype, own: list[Tensor], holes: list[list[_Hole]]) -> Tensor:
        """Send the numbers of one type to all ranks: one row per rank, padded to the longest."""
        lengths = [sum(h.shape.numel() for h in rank if h.dtype == dtype) for rank in holes]
        row = torch.zeros(max(lengths), dtype=dtype, device=self.device)
        if own:
            flat = torch.cat([t.reshape(-1) for t in own])
            row[: len(flat)] = flat.to(self.device)
        rows = row.new_empty(self.size, len(row))
        with self._reached():
            dist.all_gather(list(rows), row)
        return rows

    def _exchange(self, value: Any, error: Exception | None) -> list[Any]:
        """Tell all ranks a small value or an error; raise the first error of any rank in all of them."""
        told: list[Any] = [None] * self.size
        with self._reached():
            dist.all_gather_object(told, (value, None if error is None else _plain(error)))
        for rank, (_, failed) in enumerate(told):
            if failed is not None:
                raise _shared(
                    error if rank == self.rank and error is not None else _error(rank, failed)
                )
        return [value for value, _ in told]

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Say in words that another rank has gone."""
        try:
            yield
        except RuntimeError as error:
            raise ResourceError(
                f"rank {self.rank} of {self.size}: another rank has gone, or has not answered for"
                f" {_timeout():g} s ({_reason(error)}).",
                hint="What was saved is whole: run the same command with --resume, or give torchrun"
                f" --max-restarts. A slow rank is waited for longer with {TIMEOUT}=SECONDS.",
            ) from error


@contextmanager
def open_team(device: torch.device) -> Iterator[Team]:
    """Join the other processes that ``torchrun`` started; alone where it did not start this one.

    Args:
        device: Where this process computes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    store, size = _joined(device)
    try:
        # Other accelerators send by way of the host.
        yield Ranks(device if device.type == "cuda" else torch.device("cpu"))
    except Exception as error:
        if getattr(error, "shared", False):
            _part(store, size)
        raise
    _part(store, size)


def _joined(device: torch.device) -> tuple[Any, int]:
    """Connect with all other ranks; return the store that they share, and how many they are."""
    patience = timedelta(seconds=_timeout())
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, size = next(rendezvous("env://", timeout=patience))
        # After a restart the store may still hold the addresses of those who died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    except RuntimeError as error:
        raise ResourceError(
            f"the other ranks cannot be reached ({_reason(error)}).",
            hint="Look at their messages, and at --master-addr or --rdzv-endpoint of torchrun.",
        ) from error
    return store, size


def _reason(error: Exception) -> str:
    """Return what torch says first, without the place in its source."""
    return str(error).splitlines()[0].rsplit("] ", 1)[-1].split(". ")[0]


def _part(store: Any, size: int) -> None:
    """Close the connections when no rank waits for a message any more: else one of them may abort."""
    if store.add("torchemo/ready to part", 1) == size:
        store.set("torchemo/all ready", "yes")
    store.wait(["torchemo/all ready"])
    dist.destroy_process_group()


def refuse_idle(team: Team, groups: int) -> None:
    """Refuse more processes than there are groups of tasks in a step."""
    if team.size > groups:
        raise ConfigError(
            f"{team.size} ranks for {groups} group(s) of tasks in a step: some would have nothing to do.",
            hint="Use fewer ranks, more tasks per step (train.tasks); or, where tasks go through the network"
            " in one call, train.batched=no.",
        )


def _timeout() -> float:
    return float(os.environ.get(TIMEOUT, "600"))


def _is_hole(value: object) -> bool:
    return isinstance(value, _Hole)


def _fill(into: dict[int, Tensor], row: Tensor, holes: list[_Hole], dtype: torch.dtype) -> None:
    """Cut the numbers of a rank into the tensors they were."""
    places = [i for i, hole in enumerate(holes) if hole.dtype == dtype]
    sizes = [holes[i].shape.numel() for i in places]
    for i, part in zip(places, torch.split(row[: sum(sizes)], sizes), strict=True):
        into[i] = part.view(holes[i].shape)


def _plain(error: Exception) -> _Failed:
    if isinstance(error, TorchemoError):
        return _Failed(type(error), error.message, error.hint)
    return _Failed(None, f"{type(error).__name__}: {error}", None)


def _error(rank: int, failed: _Failed) -> Exception:
    if failed.kind is None:
        return RuntimeError(f"rank {rank}: {failed.message}")
    return failed.kind(failed.message, hint=failed.hint)


def _shared(error: Exception) -> Exception:
    """Mark an error that every rank raises, so that one of them alone prints it."""
    error.shared = True  # type: ignore[attr-defined]
    return error
