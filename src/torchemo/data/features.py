"""Features computed once: every image of a set seen by a frozen network, packed like images.

A set of features is a packed set whose rows are vectors. What has been computed lies beside its final place
until it is complete, so that an interrupted computation continues where it was left.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, UInt8
from numpy.typing import NDArray

from torchemo.core.errors import DataError, ResourceError
from torchemo.core.locks import locked
from torchemo.data.formats.images import PictureForm
from torchemo.data.index import ClassIndex
from torchemo.data.listing import BadPicture, Listing, Picture, Progress, bad_picture, decode_all
from torchemo.data.load import with_listed_splits
from torchemo.data.packed import (
    FEATURES,
    VERSION,
    PackReport,
    check_place,
    header,
    open_packed,
    skipped_in,
    sync,
    sync_folder,
    write_index,
    writing,
)

AT_ONCE = 32
"""Images of one call of the network, and between two points from which a computation can continue."""

_DONE = "done.json"


class FeatureNetwork(Protocol):
    """A frozen network that turns images into vectors."""

    @property
    def size(self) -> int:
        """Side of the images that it sees."""
        ...

    def described(self) -> dict[str, Any]:
        """Return what its features depend on: name, digest of its weights, size."""
        ...

    def __call__(self, images: UInt8[np.ndarray, "n 3 h w"]) -> Float32[np.ndarray, "n d"]:
        """Compute the features of images, 0 .. 255."""
        ...


def pack_features(
    listing: Listing,
    out: Path | str,
    network: FeatureNetwork,
    *,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Compute the features of listed images once into a packed set.

    If this is interrupted, the same call continues where it was left, unless images or network have
    changed.

    Args:
        listing: What to pack; see `torchemo.data.load.find`.
        out: The folder to make; it must not exist.
        network: What sees the images.
        skip_bad: Leave out images that cannot be read, and name them in the report.
        progress: Called with (images done, images in all).

    Raises:
        DataError: An image is bad, or ``out`` exists.
        ResourceError: The disk is full.
    """
    return _packed(listing, Path(out), network, digest_of(listing), skip_bad, progress)


def cached_features(
    listing: Listing,
    network: FeatureNetwork,
    folder: Path,
    *,
    on_bad: Callable[[BadPicture], None] | None = None,
    progress: Progress | None = None,
) -> ClassIndex:
    """Open the features of listed images in a cache folder; compute them if they are not there.

    They are found again by the contents of the images and by the network, so that files that move or get
    other splits keep their features. ``on_bad`` is called for every image that cannot be read; without
    it the first one is refused.
    """
    data = digest_of(listing)
    plain = json.dumps([network.described(), data], sort_keys=True)
    out = folder / hashlib.sha256(plain.encode()).hexdigest()[:32]
    if not out.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"{folder}: cannot be made, to hold features ({error.strerror}).",
                hint="Set TORCHEMO_CACHE to a folder that can be written.",
            ) from error
        _packed(listing, out, network, data, on_bad is not None, progress)
    for bad in skipped_in(out):
        if on_bad is None:
            raise DataError(f"{bad.name}: {bad.reason}")
        on_bad(bad)
    return with_listed_splits(open_packed(out), listing)


def cache_folder() -> Path:
    """Return where features are kept: TORCHEMO_CACHE, or the user's cache folder."""
    given = os.environ.get("TORCHEMO_CACHE")
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "torchemo"
    return (Path(given) if given else base) / "features"


def digest_of(listing: Listing) -> str:
    """Return the SHA-256 of the listed images and of the names of their classes, whatever the splits."""
    digest = hashlib.sha256(json.dumps([listing.invert, FEATURES]).encode())
    for listed in listing.classes:
        digest.update(json.dumps([listed.name, len(listed.pictures)]).encode())
        for picture in listed.pictures:
            digest.update(repr(picture.box).encode())
            digest.update(hashlib.sha256(_contents(picture)).digest())
    return digest.hexdigest()


def _contents(picture: Picture) -> bytes:
    try:
        found = picture.read()
    except DataError as error:  # it stays bad, and is reported by name where it is decoded
        return error.message.encode()
    return found if isinstance(found, bytes) else repr(found.shape).encode() + found.tobytes()


def _packed(
    listing: Listing,
    out: Path,
    network: FeatureNetwork,
    data: str,
    skip_bad: bool,
    progress: Progress | None,
) -> PackReport:
    about = {"network": network.described(), "data": data}
    with _partial(out) as folder:
        if folder is None:  # another process has made it meanwhile
            counts = open_packed(out).counts.tolist()
            return PackReport(out, sum(counts), len(counts), ())
        rows = _Rows(folder / FEATURES, folder / _DONE, {**about, "skip_bad": skip_bad}, listing)
        with rows.stream:
            _compute(listing, rows, network, progress)
            rows.finish()
        shape = [sum(rows.counts), rows.width]
        whole = {"version": VERSION, "shape": shape, **about}
        write_index(folder, listing, rows.counts, rows.skipped, about=whole, file=FEATURES)
        (folder / _DONE).unlink()
        open_packed(folder)
        sync_folder(folder)
        folder.rename(out)
        sync_folder(out.parent)
    return PackReport(out, sum(rows.counts), len(rows.counts), tuple(rows.skipped))


@contextlib.contextmanager
def _partial(out: Path) -> Iterator[Path | None]:
    """Give the folder of what has been computed; None if another process has just completed it."""
    check_place(out, 0)
    folder = out.parent / f".partial-{out.name}"
    claim = folder.with_name(f"{folder.name}.lock")
    with writing(out), locked(claim, wait=True):  # waits for whoever computes the same
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "a link is in the way", str(folder))
        folder.mkdir(exist_ok=True)
        yield None if out.exists() else folder
    if out.exists():
        with contextlib.suppress(OSError):  # Windows keeps it while another one waits for it
            claim.unlink()


def _compute(
    listing: Listing, rows: "_Rows", network: FeatureNetwork, progress: Progress | None
) -> None:
    form = PictureForm(network.size, network.size, 3, invert=listing.invert)
    seen, total = rows.seen, listing.total
    images: list[tuple[int, NDArray[Any]]] = []
    for number, picture, pixels in decode_all(_after(listing, seen), form):
        seen += 1
        if not isinstance(pixels, DataError):
            images.append((number, pixels))
        elif rows.skip_bad:
            rows.skipped.append(bad_picture(picture, pixels))
        else:
            raise pixels
        if images and (len(images) == AT_ONCE or seen == total):
            made = network(np.stack([pixels for _, pixels in images]))
            rows.add(made, [number for number, _ in images], seen=seen)
            images = []
            if progress is not None:
                progress(seen, total)
    if not sum(rows.counts):
        raise DataError("there are no images that can be read.")


def _after(listing: Listing, seen: int) -> Listing:
    """Leave out the first images of a listing; classes keep their numbers."""
    starts = accumulate((len(c.pictures) for c in listing.classes), initial=0)
    return replace(
        listing,
        classes=tuple(
            c._replace(pictures=c.pictures[max(0, seen - start) :])
            for c, start in zip(listing.classes, starts, strict=False)
        ),
    )


class _Rows:
    """Rows on disk that grow, and a note how far they are complete."""

    def __init__(self, file: Path, note: Path, key: dict[str, Any], listing: Listing) -> None:
        self.file, self.note, self.key = file, note, key
        self.skip_bad = bool(key["skip_bad"])
        self.counts, self.skipped = [0] * len(listing.classes), list[BadPicture]()
        self.seen, self.width = 0, 0
        self.digest = hashlib.sha256()
        self._take_up()
        self.stream = file.open("r+b" if self.seen else "wb")
        self.stream.seek(0, os.SEEK_END)

    def add(self, made: NDArray[Any], numbers: list[int], *, seen: int) -> None:
        """Append rows and note that they are there."""
        if not np.isfinite(made).all():
            raise DataError("the network's features are not finite.", hint="Check its weights.")
        if not self.width:
            self.width = made.shape[1]
            self.stream.write(header(0, (self.width,), "<f4"))
        content = np.ascontiguousarray(made, dtype="<f4").tobytes()
        self.stream.write(content)
        sync(self.stream)
        self.digest.update(content)
        for number in numbers:
            self.counts[number] += 1
        self.seen = seen
        said = {
            "key": self.key, "seen": seen, "width": self.width, "counts": self.counts,
            "skipped": self.skipped, "sha256": self.digest.hexdigest(),
        }  # fmt: skip
        fresh = self.note.with_suffix(".new")
        fresh.write_text(json.dumps(said), encoding="utf-8")
        fresh.replace(self.note)

    def finish(self) -> None:
        """Write how many rows there are into the header."""
        self.stream.seek(0)
        self.stream.write(header(sum(self.counts), (self.width,), "<f4"))
        sync(self.stream)

    def _take_up(self) -> None:
        """Continue from rows of the same images and network that are as they were noted."""
        try:
            said = json.loads(self.note.read_text(encoding="utf-8"))
            begin = len(header(0, (said["width"],), "<f4"))
            length = 4 * said["width"] * sum(said["counts"])
            content = self.file.read_bytes()[begin : begin + length]
            fits = said["key"] == self.key and len(said["counts"]) == len(self.counts)
            digest = hashlib.sha256(content)
            if not fits or digest.hexdigest() != said["sha256"]:
                return
        except (OSError, ValueError, KeyError, TypeError):
            return
        os.truncate(self.file, begin + length)  # rows after the last note are computed again
        self.seen, self.width, self.counts = said["seen"], said["width"], said["counts"]
        self.skipped = [BadPicture(*bad) for bad in said["skipped"]]
        self.digest = digest
