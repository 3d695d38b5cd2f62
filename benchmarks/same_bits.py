"""Show that two commits train the same: the same runs in both, compared tensor by tensor, bit for bit.

    python benchmarks/same_bits.py BEFORE [--most 20]

BEFORE is a commit; the other side is the working tree. BEFORE trains every preset and one cell of each study
for a few steps. The working tree trains from the configurations that BEFORE wrote, so that reading
configurations of earlier versions is compared as well. Needs no data; takes about three minutes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]

BEFORE = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from torchemo.config.presets import names, preset
from torchemo.core.errors import TorchemoError
from torchemo.lab.study.catalogue import ENTRIES
from torchemo.lab.study.plan import plan
from torchemo.lab.study.scales import scale_of
from torchemo.runs.train import train_run

torch.set_num_threads(1)
out, most = Path(sys.argv[1]), int(sys.argv[2])


def run(name, config):
    length = "steps" if hasattr(config.train, "steps") else "iterations"
    few = {length: min(most, getattr(config.train, length)), "tasks": 3, "validation_tasks": 6}
    small = {"image_size": 16, "n_query": 3}
    config = replace(config, train=replace(config.train, **few), data=replace(config.data, **small))
    try:
        train_run(out / name, config)
        print("trained", name, flush=True)
    except TorchemoError as error:
        print("left out", name, error.message, flush=True)


for name in names():
    for regression in (False, True):
        if not name.endswith("-published"):
            try:
                config = preset(name, regression=regression, n_shot=5 if regression else 1)
            except TorchemoError:
                continue
            run(name + ("-regression" if regression else ""), config)
for entry in ENTRIES.values():
    for tasks in ("pictures", "images", "regression"):
        if f"smoke/{tasks}" in entry.scales and entry.measure == "score":
            study = plan(entry, scale_of("smoke", tasks))
            run(f"{entry.name}-{tasks}", study.config(study.available[-1], {}))
"""

AFTER = """
import sys, warnings
from pathlib import Path
import torch
from torchemo.core.errors import TorchemoError
from torchemo.runs.load import read_config
from torchemo.runs.train import train_run

torch.set_num_threads(1)
warnings.simplefilter("ignore")
before, out = Path(sys.argv[1]), Path(sys.argv[2])
for root in sorted(before.iterdir()):
    try:
        train_run(out / root.name, read_config(root))
    except TorchemoError as error:
        print("left out", root.name, error.message, flush=True)
"""

OLD_NAMES = {
    "memory.": "store.",
    "familiarity.": "skip_unfamiliar.",
    "trust.doubted": "skip_unhelpful.failed",
}
"""How parts of a memory were named before they were called as they are today."""


def main() -> int:
    """Compare a commit with the working tree and return 1 if a run differs."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("before", help="a commit")
    words.add_argument("--most", type=int, default=20, help="outer steps of a run")
    given = words.parse_args()
    with tempfile.TemporaryDirectory() as place:
        tree, runs, again = (Path(place) / name for name in ("tree", "before", "after"))
        _git("worktree", "add", "--detach", tree, given.before)
        try:
            _python(tree, BEFORE, runs, given.most)
            _python(ROOT, AFTER, runs, again)
        finally:
            _git("worktree", "remove", "--force", tree)
        return _compare(runs, again)


def _git(*words: object) -> None:
    command = ["git", "-C", str(ROOT), *map(str, words)]
    subprocess.run(command, check=True)  # noqa: S603


def _python(tree: Path, code: str, *words: object) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, words)]
    subprocess.run(command, env=environment, check=True)  # noqa: S603


def _compare(before: Path, after: Path) -> int:
    differ, compared = 0, 0
    for root in sorted(before.iterdir()):
        if not (root / "checkpoints").is_dir():
            continue
        compared += 1
        found = list(_differences(_state(root), _state(after / root.name)))
        if found:
            differ += 1
            print(f"{root.name}: {len(found)} tensors differ, {', '.join(found[:4])}")
    print(f"{compared} runs compared, {differ} differ")
    return 1 if differ or not compared else 0


def _state(root: Path) -> dict:
    """Read all tensors of the last checkpoint, with the names of today."""
    saved = sorted((root / "checkpoints").glob("step-*"))
    if not saved:
        return {}
    found = {}
    for file in sorted(saved[-1].glob("*.safetensors")):
        group = "memory" if file.stem == "emo" else file.stem
        for name, tensor in load_file(file).items():
            old = next((o for o in OLD_NAMES if group == "memory" and name.startswith(o)), None)
            if old is not None and file.stem == "emo":
                name = OLD_NAMES[old] + name.removeprefix(old)
            found[f"{group}/{name}"] = tensor
    return found


def _differences(one: dict, other: dict):
    yield from sorted(one.keys() ^ other.keys())
    for name in sorted(one.keys() & other.keys()):
        if one[name].shape != other[name].shape or one[name].tolist() != other[name].tolist():
            yield name


if __name__ == "__main__":
    sys.exit(main())
