"""What data cost: drawing tasks as a share of a step, packing against the decoder, memory that stays flat."""

import hashlib
import io
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from torchemo.core.workers import run_tasks, usable_cores
from torchemo.data.episodes import EpisodeSpec, sample_episodes
from torchemo.data.index import ClassIndex
from torchemo.data.listing import WORTH_A_THREAD, listing_of
from torchemo.data.load import find
from torchemo.data.packed import open_packed, pack
from torchemo.data.synthetic.pictures import procedural
from torchemo.lab.bench.clock import Variant, interleave, spread
from torchemo.lab.bench.measures.work import Work
from torchemo.training.step import outer_step


def sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the tasks of an outer step from a packed set, and take the step, in turns."""
    work = Work(**request["work"])
    spec = EpisodeSpec(work.n_way, work.n_shot, work.n_query)
    learner = work.make_learner()
    params, episode, number = work.params(), work.episode(), count()
    with _folder() as place:
        # Packed, as users with many images have them; what decoding costs is a case of its own.
        synthetic = procedural(image_size=work.size, classes_per_family=10)
        pack(listing_of(synthetic, name="synthetic"), place / "packed")
        index = open_packed(place / "packed")

        def draw() -> None:
            sample_episodes(
                index,
                spec,
                seed=0,
                split="train",
                start=next(number) * work.tasks,
                count=work.tasks,
            )

        times = interleave(
            {"tasks": Variant(draw), "step": Variant(lambda: outer_step(learner, params, episode))},
            repeats=request["repeats"],
        )
    pairs = list(zip(times["tasks"], times["step"], strict=True))
    return {
        **{name: spread([s.cpu for s in samples]) for name, samples in times.items()},
        "share": spread([drawn.cpu / step.cpu for drawn, step in pairs]),
    }


def packing(request: Mapping[str, Any]) -> dict[str, Any]:
    """Pack JPEG files at ``packed`` pixels; decode them with Pillow alone; write as many bytes; in turns."""
    number, side = count(), request["packed"]
    with _folder() as place:
        files = _write_jpegs(place / "images", size=request["size"], images=request["images"])

        def packed() -> None:
            out = place / f"packed-{next(number)}"
            pack(find(place / "images"), out, image_size=side)
            shutil.rmtree(out)

        # The decoder alone gets as many threads as packing takes, or it would be no limit.
        size = sum(file.stat().st_size for file in files) / len(files)
        workers = usable_cores() if size >= WORTH_A_THREAD else 1

        def decoded() -> None:
            run_tasks(partial(_decode, side=side), files, workers=workers)

        def written() -> None:
            _write_and_read_back(place / "pixels", image=bytes(3 * side**2), times=len(files))

        times = interleave(
            {"pack": Variant(packed), "decode": Variant(decoded), "disk": Variant(written)},
            repeats=request["repeats"],
        )
    rounds = list(zip(times["pack"], times["decode"], times["disk"], strict=True))
    rates = {
        name: spread([len(files) / s.wall for s in samples]) for name, samples in times.items()
    }
    return {
        "images": len(files),
        "threads": workers,
        "per_second": rates,
        "share_of_decoder": spread([decode.wall / pack.wall for pack, decode, _ in rounds]),
        "share_of_both": spread([(one.wall + two.wall) / pack.wall for pack, one, two in rounds]),
    }


def _decode(file: Path, *, side: int) -> None:
    """Read an image at a size, with Pillow alone."""
    with Image.open(io.BytesIO(file.read_bytes())) as image:
        same = image.size == (side, side)
        np.asarray(image if same else image.resize((side, side), Image.Resampling.LANCZOS))


def _write_and_read_back(file: Path, *, image: bytes, times: int) -> None:
    """Do what no packing can do without: write, sync, and compute the SHA-256 of what was written."""
    with file.open("wb") as stream:
        for _ in range(times):
            stream.write(image)
        stream.flush()
        os.fsync(stream.fileno())
    with file.open("rb") as stream:
        hashlib.file_digest(stream, "sha256")
    file.unlink()


def mapped(request: Mapping[str, Any]) -> dict[str, Any]:
    """Draw many batches from a memory map, where the system keeps little of it in memory.

    The map is a file of the given size without content. Whenever more than ``cache_mb`` of it is resident
    it is all let go, as a system does whose memory is short.
    """
    size, spec, seen = request["size"], EpisodeSpec(), []
    with _folder() as place, _mapped_file(place, request["megabytes"]) as file:
        images = np.frombuffer(file, np.uint8)
        images = images[: len(images) // (3 * size**2) * 3 * size**2].reshape(-1, 3, size, size)
        classes = len(images) // 20
        index = ClassIndex(
            images[: 20 * classes],
            np.repeat(np.arange(classes), 20),
            [str(c) for c in range(classes)],
            ["train"] * classes,
            ["empty"] * classes,
        )
        dropped = 0
        for batch in range(1, request["batches"] + 1):
            sample_episodes(index, spec, seed=0, split="train", start=4 * batch, count=4)
            held = resident()
            if batch % max(request["batches"] // 20, 1) == 0:
                seen.append({"batch": batch, **held})
            if held["mapped_mb"] > request["cache_mb"]:
                file.madvise(mmap.MADV_DONTNEED)
                dropped += 1
        del images, index  # they hold the map open
    early = next(s for s in seen if s["batch"] >= request["batches"] // 10)
    growth = seen[-1]["anonymous_mb"] / early["anonymous_mb"] - 1
    return {"seen": seen, "times_let_go": dropped, "growth": growth}


def resident() -> dict[str, float]:
    """Return the resident memory of this process: its own, and pages of files it has mapped."""
    status = Path("/proc/self/status").read_text()
    found = {name: int(kb) / 1024 for name, kb in re.findall(r"Rss(Anon|File):\s+(\d+) kB", status)}
    return {"anonymous_mb": found["Anon"], "mapped_mb": found["File"]}


def _write_jpegs(root: Path, *, size: int, images: int) -> list[Path]:
    per_class = 20
    index = procedural(
        image_size=min(size, 84),
        classes_per_family=max(1, images // (4 * per_class)),
        images_per_class=per_class,
    )
    files = []
    for number, (pixels, label) in enumerate(zip(index.images, index.label, strict=True)):
        file = root / index.class_names[label] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels.transpose(1, 2, 0)).resize((size, size))
        image.save(file, quality=90)
        files.append(file)
    return files


@contextmanager
def _mapped_file(place: Path, megabytes: int) -> Iterator[mmap.mmap]:
    with (place / "empty").open("wb+") as stream:
        stream.truncate(megabytes << 20)
        # Not closed by hand: arrays may still look at it, and it goes with the last of them.
        yield mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchemo-bench-") as name:
        yield Path(name)
