"""``python -m tests.attack.flips``: flip single bits in all files that are kept and count what is noticed.

A flip is *noticed* if whoever reads the file refuses it or leaves the line out, and *same* if what is read is
what was read before. Anything else is *silent*, and a failure.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.attack.harness import command, quick_disk

HERE = Path(__file__).parent
RECORD = HERE / "flips.json"


def reading(root: Path, file: Path):
    """Read a file of a run as the commands do; raise what they refuse with."""
    from torchemo.core.errors import CheckpointError
    from torchemo.runs import events
    from torchemo.runs.compare import read_result
    from torchemo.runs.load import check_config, read_config
    from torchemo.runs.notes import thumbnails
    from torchemo.runs.storage import checkpoint
    from torchemo.runs.storage.seal import without_digest
    from torchemo.runs.visits.store import reading as read_store

    if file.parent.parent.name == "checkpoints":
        return repr(checkpoint.verify(file.parent))
    if (root / "store.json").exists():
        store = read_store(root)
        if faults := store.faults():
            raise CheckpointError(faults[0])
        return store.index
    if file.name == thumbnails.FILE:
        step = checkpoint.step_of(checkpoint.published(root)[-1])
        if (found := thumbnails.load(root, step=step)) is None:
            raise CheckpointError("no thumbnails that can be shown")
        return [tensor.tolist() for tensor in (found.images, found.known)]
    if file.name in ("config.toml", "accepted.toml"):
        config = read_config(root)
        for path in checkpoint.published(root):
            check_config(root, config, checkpoint.read_manifest(path))
        return "as it was saved"
    if file.name == "events.jsonl":
        return events.read(file)
    if file.name == "environment.json":
        return without_digest(json.loads(file.read_text()), what=file.name)
    return read_result(file)


def noticed(root: Path, file: Path, data: bytes, sound: object, rng: random.Random) -> str:
    """Flip one bit of a file, read it, and put it back."""
    from torchemo.core.errors import TorchemoError

    flipped = bytearray(data)
    flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(flipped)
    try:
        found = reading(root, file)
    except (TorchemoError, ValueError):  # JSON that is none is refused by those who read it
        return "noticed"
    finally:
        file.write_bytes(data)
    if (
        file.name == "events.jsonl"
        and found == sound[: len(found)]
        and len(found) == len(sound) - 1
    ):
        return "noticed"  # the last line lost its end, as after a crash
    return "same" if found == sound else "silent"


def files_in(world: Path) -> list[tuple[Path, Path]]:
    """Return every kind of file that is kept, each with the run or store that it belongs to."""
    roots = [world / name for name in ("points", "accepted", "store", "pictures")]
    found = [(root, p) for root in roots for p in sorted(root.rglob("*")) if p.is_file()]
    known, files = set(), []
    for root, path in found:
        if path.name not in (".lock", ".owner", "report.html") and (
            root.name in ("points", "store") or path.name not in known
        ):
            files.append((root, path))
        known.add(path.name)
    return files


def make_more(world: Path) -> Path:
    """Add what else may be kept: results of another kind, accepted options, thumbnails."""
    command("eval", world / "points", "--tasks", 4, "--statistics", "transductive", codes={0})
    command("memory", "thumbnails", world / "pictures", codes={0})
    root = Path(shutil.copytree(world / "points", world / "accepted"))
    file = root / "config.toml"
    file.write_text(file.read_text().replace("\nsteps = 6\n", "\nsteps = 8\n"))
    command("checkpoint", "accept-config", root, codes={0})
    return world


def flip(world: Path, count: int, *, seed: int = 0) -> dict:
    """Flip so many bits over all kinds of files in turn; count how each was taken."""
    rng = random.Random(seed)
    files = files_in(world)
    sound = {file: (file.read_bytes(), reading(root, file)) for root, file in files}
    ends: dict[str, Counter] = {}
    for number in range(count):
        root, file = files[number % len(files)]
        end = noticed(root, file, *sound[file], rng)
        ends.setdefault(_kind(file), Counter())[end] += 1
    kinds = {name: dict(sorted(counted.items())) for name, counted in sorted(ends.items())}
    return {"flips": count, "seed": seed, "files": kinds}


def _kind(file: Path) -> str:
    """Return the name of a file; visits are called after what they hold."""
    return f"visits/*.{file.name.partition('.')[2]}" if file.parent.name == "visits" else file.name


def main() -> int:
    """Run the command; 1 if a flip was silent."""
    from tests.attack.world import make_world

    parser = argparse.ArgumentParser(prog="python -m tests.attack.flips", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RECORD)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=quick_disk()) as folder:
        world = make_more(make_world(Path(folder)))
        found = flip(world, asked.count, seed=asked.seed)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["files"]))
    return int(any("silent" in ends for ends in found["files"].values()))


if __name__ == "__main__":
    sys.exit(main())
