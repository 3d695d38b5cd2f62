"""A store of visits: open it, keep a visit, list, forget, rename, merge, export.

A visit is kept from the base learner's own inner steps, which no other visit has a part in. Whatever is
forgotten therefore leaves no trace in what stays, and merging two stores is visiting in sequence.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchemo.core.errors import CheckpointError, ConfigError, DataError
from torchemo.core.types import Params
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.recognise import ByName, Recogniser
from torchemo.memory.lifelong.shares import COMPARED
from torchemo.memory.lifelong.visits import PastVisit, Sight
from torchemo.runs.storage import tensorfile
from torchemo.runs.visits import files
from torchemo.runs.visits.files import FolderSource, Source
from torchemo.runs.visits.index import KINDS, LONGEST_NAME, Index, Kind, Settings, Visit
from torchemo.runs.visits.protect import protected


class New(NamedTuple):
    """A visit that may be kept.

    Attributes:
        sight: What was seen of the task.
        values: Support gradients of the base learner's inner steps.
        classes: Names under which the classes are kept.
        slots: Ids of the visits that were recalled for it.
    """

    sight: Sight
    values: Params
    classes: tuple[str, ...]
    recalled: tuple[str, ...] = ()


class ClassLine(NamedTuple):
    """What a store knows of a class: how often it came, its images in all, and when last."""

    name: str
    visits: int
    images: int
    last: str


@final
class Store:
    """A store that was opened; `writing` gives one that can be changed.

    Args:
        source: Where its bytes are.
        index: What it says about itself.
        writable: Whether this process is its only writer.
    """

    def __init__(self, source: Source, index: Index, *, writable: bool = False) -> None:
        self.source, self.index = source, index
        self._writable = writable

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.source.path

    @property
    def settings(self) -> Settings:
        """How it works."""
        return self.index.settings

    def __len__(self) -> int:
        return len(self.index.visits)

    def __repr__(self) -> str:
        return f"Store({len(self)} visits of {len(self.classes)} classes in {self.path})"

    @property
    def classes(self) -> tuple[ClassLine, ...]:
        """Everything known of each class, by name."""
        found: dict[str, ClassLine] = {}
        for visit in self.index.by_age:
            for name, shots in zip(visit.classes, visit.shots, strict=True):
                old = found.get(name, ClassLine(name, 0, 0, ""))
                found[name] = ClassLine(name, old.visits + 1, old.images + shots, visit.when)
        return tuple(found[name] for name in sorted(found))

    def memory(
        self,
        head: tuple[str, ...],
        *,
        recogniser: Recogniser | None = None,
        besides: Collection[str] = (),
    ) -> LifelongMemory:
        """Return the memory of the visits; their files are read when they are needed.

        Args:
            head: Names of the head tensors.
            recogniser: What recognises classes; by default their names.
            besides: Ids of visits to leave out.
        """
        memory = LifelongMemory(recogniser or ByName(), head=head)
        for visit in self.index.by_age:
            if visit.id not in besides:
                memory.add(self._past(visit))
        return memory

    def compared(self, visit: Visit) -> Params:
        """Return the class means of a visit, by which its classes are recognised again."""
        means = files.read_tensors(self.source, visit, "means")
        if COMPARED in means:
            return means
        raise ConfigError(
            f"{self.path} has visits whose classes cannot be recognised by images: they were kept for names,"
            " or by an earlier version.",
            hint="Put them into a store by names: torchemo memory create NEW --of RUN, then torchemo memory"
            f" merge NEW {self.path}",
        )

    def _past(self, visit: Visit) -> PastVisit:
        by_images = self.settings.recognise == "images"
        means = self.compared(visit) if by_images else {}
        values = _Later(lambda: files.read_tensors(self.source, visit, "gradients"))
        return PastVisit(visit.classes, Sight(visit.shots, means), values, visit.when)

    def find(self, values: Params) -> Visit | None:
        """Find the visit of the same images: their gradients are the same, bit for bit."""
        # With noise, no two visits have the same bytes.
        kept, _ = protected(values, {}, self.settings)
        known = _id(tensorfile.encode(kept))
        return next((visit for visit in self.index.visits if visit.id == known), None)

    def faults(self) -> list[str]:
        """Check every byte; return what is wrong."""
        found = []
        for visit in self.index.visits:
            for kind in KINDS:
                try:
                    files.read_tensors(self.source, visit, kind)
                except CheckpointError as error:
                    found.append(error.message)
        return found

    # -- changes -------------------------------------------------------------------------------------

    def keep(self, new: New, *, when: str, instead_of: Collection[str] = ()) -> tuple[Visit, ...]:
        """Keep a visit; return the visits that a full store forgets for it.

        Args:
            new: The visit.
            when: Date and time.
            instead_of: Ids of visits that it replaces.
        """
        classes = checked_names(new.classes)
        seen = new.sight.means
        if self.settings.recognise == "images":  # nothing asks for the other spaces
            seen = {COMPARED: seen[COMPARED]}
        values, means = protected(new.values, seen, self.settings)
        for what, tensors in (("gradients", values), ("class means", means)):
            tensorfile.check_finite(tensors, what=f"this visit cannot be remembered, {what}")
        data: dict[Kind, bytes] = {
            "gradients": tensorfile.encode(values),
            "means": tensorfile.encode(means),
        }
        index = self.index.without(set(instead_of))
        visit = self._written(_id(data["gradients"]), data, index, when, classes, new.sight.shots)
        return self._commit(*_placed(index, visit, new.recalled))

    def _written(
        self,
        name: str,
        data: Mapping[Kind, bytes],
        index: Index,
        when: str,
        classes: tuple[str, ...],
        shots: tuple[int, ...],
    ) -> Visit:
        if name in {visit.id for visit in (*index.visits, *self.index.visits)}:
            raise DataError(f"{self.path} holds this visit already.")
        made = {kind: files.write_file(self.path, name, kind, d) for kind, d in data.items()}
        return Visit(name, when, classes, shots, made["gradients"], made["means"])

    def _commit(self, index: Index, forgotten: tuple[Visit, ...] = ()) -> tuple[Visit, ...]:
        if not self._writable:
            raise RuntimeError("a store that was opened for reading cannot be changed")
        files.commit(self.path, index)
        self.index = index
        return forgotten

    def forget(
        self, *, classes: Iterable[str] = (), visits: Iterable[str] = (), everything: bool = False
    ) -> tuple[Visit, ...]:
        """Forget visits, or all visits in which a class had a part; return them.

        The gradients of a visit depend on all of its images, so that a class goes with its whole visits.
        """
        wanted = {self._known(name) for name in classes}
        ids = {self._visit(one).id for one in visits}
        gone = tuple(
            v for v in self.index.visits if everything or v.id in ids or wanted & set(v.classes)
        )
        return self._commit(self.index.without({visit.id for visit in gone}), gone)

    def rename(self, old: str, new: str, *, join: bool = False) -> int:
        """Rename a class and return in how many visits it was.

        Args:
            old: Its name.
            new: Its new name.
            join: Whether ``new`` may be a known class: the two are then one.
        """
        old, new = self._known(old), checked_name(new)
        both = [v for v in self.index.visits if {old, new} <= set(v.classes)]
        if old != new and both:
            raise ConfigError(
                f"'{old}' and '{new}' are two classes of the visit {both[0].id}, so they cannot be one."
            )
        if old != new and not join and new in {line.name for line in self.classes}:
            raise ConfigError(
                f"there is already a class '{new}'.", hint="To make the two one, add --join."
            )
        visits = tuple(
            v._replace(classes=tuple(new if name == old else name for name in v.classes))
            for v in self.index.visits
        )
        self._commit(replace(self.index, visits=visits))
        return sum(new in visit.classes for visit in visits)

    def merge(self, others: Sequence["Store"]) -> tuple[int, tuple[Visit, ...]]:
        """Add the visits of other stores, oldest first; return how many, and which were forgotten for them.

        Visits that are here already are not added again.
        """
        for other in others:
            self._check_fits(other)
        index, forgotten, added = self.index, dict[str, Visit](), 0
        known = {visit.id for visit in index.visits}
        coming = [(v.when, i, v) for i, other in enumerate(others) for v in other.index.by_age]
        for _, i, visit in sorted(coming, key=lambda one: (one[0], one[1])):
            if visit.id in known:
                continue
            if self.settings.recognise == "images":
                others[i].compared(visit)
            for kind in KINDS:
                data = files.read_bytes(others[i].source, visit, kind)
                files.write_file(self.path, visit.id, kind, data)
            known.add(visit.id)
            index, gone = _placed(index, visit, ())
            forgotten |= {one.id: one for one in gone}
            added += 1
        self._commit(index)
        return added, tuple(forgotten.values())

    def _check_fits(self, other: "Store") -> None:
        refuse_other_weights(other, self.index.weights, what=f"{self.path} is of {self._of}")
        ours, theirs = self.settings, other.settings
        if (ours.clip, ours.noise) != (theirs.clip, theirs.noise):
            raise ConfigError(
                f"{other.path} keeps gradients with clip {theirs.clip} and noise {theirs.noise},"
                f" {self.path} with {ours.clip} and {ours.noise}.",
                hint="Merge stores with the same clip and noise.",
            )

    @property
    def _of(self) -> str:
        return f"{self.index.made_with} (weights {self.index.weights[:8]})"

    def _known(self, name: str) -> str:
        plain = unicodedata.normalize("NFC", name)
        if plain in {line.name for line in self.classes}:
            return plain
        known = ", ".join(line.name for line in self.classes) or "none"
        raise ConfigError(f"{self.path} knows no class {name!r}.", hint=f"It knows: {known:.500}.")

    def _visit(self, name: str) -> Visit:
        found = [v for v in self.index.visits if v.id.startswith(name)] if name else []
        if len(found) != 1:
            what = "several visits begin" if found else "no visit begins"
            raise ConfigError(
                f"{what} with {name!r} in {self.path}.",
                hint=f"List the visits with: torchemo memory list {self.path}",
            )
        return found[0]


def refuse_other_weights(store: Store, weights: str, *, what: str) -> None:
    """Refuse a store of other weights than these; ``what`` says whose they are."""
    if store.index.weights == weights:
        return
    raise ConfigError(
        f"{store.path} belongs to other weights: it was made with {store.index.made_with} (weights"
        f" {store.index.weights[:8]}), {what}.",
        hint="A gradient fits only the weights that it was computed with. Use another store.",
    )


def reading(path: Path) -> Store:
    """Open a store, or an exported one, to look at it."""
    source = files.source_of(path)
    return Store(source, files.read_index(source))


@contextmanager
def writing(path: Path, *, otherwise: Index | None = None) -> Iterator[Store]:
    """Open a store as its only writer; a place that cannot be written is refused at once.

    Args:
        path: Its folder.
        otherwise: The index of a new store, if there is none yet; None refuses.
    """
    if otherwise is None:
        files.source_of(path)
    with ExitStack() as held:
        held.enter_context(files.only_writer(path))
        source = FolderSource(path)
        index = files.read_index(source) if files.is_store(path) else otherwise
        files.sweep(path, index)
        if index is None:
            raise CheckpointError(f"{path} lost its index while it was opened.")
        yield Store(source, index, writable=True)


def checked_name(name: str) -> str:
    """Return a class name in Unicode form C; refuse what cannot be one."""
    plain = unicodedata.normalize("NFC", name)
    if not plain.strip() or len(plain) > LONGEST_NAME:
        raise ConfigError(f"a class name has 1 to {LONGEST_NAME} characters, got {name!r:.300}.")
    return plain


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the classes of a visit; refuse two that are the same."""
    classes = tuple(checked_name(name) for name in names)
    twice = next((name for name in classes if classes.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"two classes of this visit are both named {twice!r}.")
    return classes


def _placed(
    index: Index, visit: Visit, recalled: Collection[str]
) -> tuple[Index, tuple[Visit, ...]]:
    """Put a visit into a free slot, or into that of the visit that a full store forgets."""
    controller, ledger = index.settings.build_controller(), index.ledger()
    slots = [slot for slot, known in enumerate(index.visits) if known.id in recalled]
    slots.sort(key=lambda slot: -index.visits[slot].written)  # the newest visit is the nearest
    if slots:
        controller.touch(ledger, torch.tensor(slots))
    visits, slot = list(index.visits), len(index.visits)
    forgotten: tuple[Visit, ...] = ()
    if slot == index.settings.capacity:
        slot = controller.victim(ledger)
        forgotten = (visits[slot],)
        visits[slot] = visit
    else:
        visits.append(visit)
    controller.wrote(ledger, slot)
    return replace(index, visits=tuple(visits)).booked(ledger), forgotten


def _id(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class _Later(dict[str, Tensor]):
    """Tensors that are read when the first of them is asked for."""

    def __init__(self, read: Callable[[], Params]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, name: str) -> Tensor:
        self.update(self._read())
        if name not in self:
            raise CheckpointError(f"a visit has no gradient of '{name}'.")
        return self[name]
