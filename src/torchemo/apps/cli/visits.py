"""``torchemo memory list | create | forget | rename | merge | export``: a store of your own tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, final

import tyro

from torchemo.core.errors import CheckpointError, ConfigError, DataError
from torchemo.report.terminal import print_json, print_table, printable, say, size, told

if TYPE_CHECKING:
    from torchemo.runs.visits.index import Settings, Visit
    from torchemo.runs.visits.recognition import Recognition
    from torchemo.runs.visits.store import Store

StorePath: TypeAlias = Annotated[Path, tyro.conf.arg(metavar="STORE")]
Recognise: TypeAlias = Literal["names", "images"]


@final
@dataclass(frozen=True)
class ListVisits:
    """List the classes and visits of a store."""

    store: tyro.conf.Positional[StorePath]
    """Folder of the store, or an exported file."""
    json: bool = False
    """Print everything as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.visits.store import reading

        found = reading(self.store)
        if self.json:
            print_json(plain(found))
        else:
            _show(found)
        return 0


@final
@dataclass(frozen=True)
class CreateStore:
    """Make an empty store with settings of its own; ``adapt --remember`` makes one with the defaults."""

    store: tyro.conf.Positional[StorePath]
    """Folder of the new store."""
    of: Annotated[Path, tyro.conf.arg(metavar="RUN")]
    """Folder of the run whose tasks it will hold."""
    step: int | None = None
    """Checkpoint to use; the best on validation tasks by default."""
    recognise: Recognise = "names"
    """Recognise classes by the names of their folders, or by their images alone. For images the run learns
    from its own data what tells classes apart, unless it has (``memory calibrate``)."""
    capacity: int | None = None
    """Most visits to keep; all by default."""
    controller: str = "lru"
    """Which visit a full store forgets: fifo, lru or clock."""
    clip: float | None = None
    """Scale the gradient of an inner step down to this norm, and class means to 1."""
    noise: float = 0.0
    """Standard deviation of the noise added to every number, as a share of clip."""
    json: bool = False
    """Print what was done as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.load import load_trained
        from torchemo.runs.visits import files
        from torchemo.runs.visits.returning import fresh_index
        from torchemo.runs.visits.store import writing

        settings = self._settings()
        if files.is_store(self.store):
            raise ConfigError(f"{self.store} is a store already.", hint="Name a new folder.")
        trained = load_trained(self.of, step=self.step)
        if settings.recognise == "images":
            calibrated(self.of, step=self.step, quiet=self.json)
        index = fresh_index(trained, self.of, settings)
        with writing(self.store, otherwise=index):
            files.commit(self.store, index)
        text = f"{self.store}: an empty store for {printable(index.made_with)}"
        return told(self.json, text, created=str(self.store), made_with=index.made_with)

    def _settings(self) -> "Settings":
        from torchemo.runs.visits.index import Settings

        return Settings(self.recognise, self.capacity, self.controller, self.clip, self.noise)


@final
@dataclass(frozen=True)
class CalibrateRun:
    """Let a run learn from its own data to recognise classes by their images alone; kept beside the run."""

    run_folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """Folder of the run; its data are needed."""
    step: int | None = None
    """Checkpoint to use; the best on validation tasks by default."""
    json: bool = False
    """Print what was found as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.visits.recognition import FILE

        found = calibrated(self.run_folder, step=self.step, quiet=self.json, anew=True)
        where = self.run_folder / FILE
        text = f"written: {where}"
        gain = found.gain._asdict()
        return told(
            self.json, text, written=str(where), trust=found.trust, new=found.new, gain=gain
        )


def calibrated(root: Path, *, step: int | None, quiet: bool, anew: bool = False) -> "Recognition":
    """Return how a run recognises classes by their images; let it learn that unless it has."""
    from torchemo.runs.load import load_best, load_trained
    from torchemo.runs.visits import recognition
    from torchemo.runs.visits.returning import check_learner, weights_digest

    trained = load_trained(root, step=step)
    check_learner(trained)
    weights = weights_digest(trained)
    known = None if anew else recognition.load(root, weights=weights)
    if known is not None:
        return known
    try:
        opened = load_best(root, step=step, needed=("train", "val"))
    except DataError as error:
        raise DataError(
            error.message,
            hint="To recognise classes by images, a run learns from the data that it was trained on.",
        ) from error
    if not quiet:
        say(f"{root} learns from its data to recognise classes by their images")
    found = recognition.calibrate(opened, weights)
    recognition.save(root, found)
    if not quiet:
        say(found.words)
    return found


@final
@dataclass(frozen=True)
class ForgetVisits:
    """Delete visits from a store; afterwards no file of it holds anything of them."""

    store: tyro.conf.Positional[StorePath]
    """Folder of the store."""
    classes: tuple[str, ...] = ()
    """Forget all visits in which one of these classes had a part."""
    visits: tuple[str, ...] = ()
    """Forget these visits, named as the list names them."""
    everything: bool = False
    """Forget all visits."""
    json: bool = False
    """Print what was forgotten as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.visits.store import writing

        if not (self.classes or self.visits or self.everything):
            raise ConfigError(
                "nothing was named that should be forgotten.",
                hint="Name --classes, --visits or --everything.",
            )
        with writing(self.store) as store:
            gone = store.forget(
                classes=self.classes, visits=self.visits, everything=self.everything
            )
            left = store.classes
        text = f"forgotten: {_count(len(gone), 'visit')}; {len(left)} classes are left"
        return told(self.json, text, forgotten=[_visit(visit) for visit in gone])


@final
@dataclass(frozen=True)
class RenameClass:
    """Rename a class in all visits of a store."""

    store: tyro.conf.Positional[StorePath]
    """Folder of the store."""
    old: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="OLD")]]
    """Name of the class."""
    new: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NEW")]]
    """Its new name."""
    join: bool = False
    """Let the new name be that of a known class: the two are then one."""
    json: bool = False
    """Print what was done as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.visits.store import writing

        with writing(self.store) as store:
            count = store.rename(self.old, self.new, join=self.join)
        text = f"{printable(self.old)} is {printable(self.new)} now, in {_count(count, 'visit')}"
        return told(self.json, text, old=self.old, new=self.new, visits=count)


@final
@dataclass(frozen=True)
class MergeStores:
    """Add the visits of other stores of the same run; what is there already is not added again."""

    store: tyro.conf.Positional[StorePath]
    """Folder of the store that grows."""
    others: tyro.conf.Positional[tuple[Annotated[Path, tyro.conf.arg(metavar="OTHER")], ...]]
    """Folders of other stores, or exported files."""
    json: bool = False
    """Print what was done as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.visits.store import reading, writing

        if not self.others:
            raise ConfigError("no other store was named.", hint="torchemo memory merge STORE OTHER")
        others = [reading(path) for path in self.others]
        with writing(self.store) as store:
            added, gone = store.merge(others)
        forgotten = f"; the full store forgot {_count(len(gone), 'visit')}" if gone else ""
        text = f"added: {_count(added, 'visit')}{forgotten}"
        return told(self.json, text, added=added, forgotten=len(gone))


@final
@dataclass(frozen=True)
class ExportStore:
    """Write a store into one file, which ``memory merge`` and ``memory list`` take."""

    store: tyro.conf.Positional[StorePath]
    """Folder of the store."""
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FILE.zip")]]
    """The new file."""
    json: bool = False
    """Print what was done as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.visits import files
        from torchemo.runs.visits.store import reading

        store = reading(self.store)
        files.export(store.source, store.index, self.out)
        text = (
            f"written: {self.out}, {_count(len(store), 'visit')}\n"
            "It holds gradients and class means of your images: see docs/remember.md."
        )
        return told(self.json, text, written=str(self.out), visits=len(store))


def is_store(path: Path) -> bool:
    """Return whether a path is a store, or an exported one."""
    from torchemo.runs.visits import files

    return path.is_file() or files.is_store(path)


def verify(path: Path, *, json: bool) -> int:
    """Check every byte of a store; return 4 if something is damaged."""
    from torchemo.runs.visits.store import reading

    try:
        store = reading(path)
        visits, faults = len(store), store.faults()
    except CheckpointError as error:
        visits, faults = 0, [error.message]
    if json:
        print_json({"sound": not faults, "visits": visits, "faults": faults})
    else:
        say("\n".join(map(printable, faults)) or f"{_count(visits, 'visit')}: store is sound")
    return CheckpointError.exit_code if faults else 0


def plain(store: "Store") -> dict[str, Any]:
    """Return what a store holds, ready for JSON."""
    return {
        "made_with": store.index.made_with,
        "weights": store.index.weights,
        "settings": vars(store.settings),
        "classes": [line._asdict() for line in store.classes],
        "visits": [_visit(visit) for visit in store.index.by_age],
    }


def _visit(visit: "Visit") -> dict[str, Any]:
    return {
        "id": visit.id,
        "when": visit.when,
        "classes": dict(zip(visit.classes, visit.shots, strict=True)),
        "bytes": visit.size,
        "recalls": visit.recalls,
    }


def _show(store: "Store") -> None:
    settings = store.settings
    lines = [[c.name, str(c.visits), str(c.images), c.last[:10]] for c in store.classes]
    print_table(f"Classes of {store.path}", ["class", "visits", "images", "last"], lines)
    rows = [
        [v.id[:8], v.when[:16].replace("T", " "), ", ".join(v.classes), str(sum(v.shots)), size(v.size)]
        for v in store.index.by_age
    ]  # fmt: skip
    print_table("Visits", ["visit", "when", "classes", "images", "size"], rows)
    most = "" if settings.capacity is None else f" of at most {settings.capacity}"
    kept = "as they are" if settings.clip is None else f"clipped to {settings.clip:g}"
    noise = f" with noise {settings.noise:g}" if settings.noise else ""
    say(
        f"{_count(len(store), 'visit')}{most}, recognised by {settings.recognise}; gradients are kept"
        f" {kept}{noise}; made with {printable(store.index.made_with)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
