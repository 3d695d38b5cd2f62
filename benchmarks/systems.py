"""Check that every system learns, in two minutes or less each.

python benchmarks/systems.py --data ../shared/data     (ten minutes on two idle cores)

A check passes if accuracy on test tasks reaches what it should: a measured figure of a plain implementation,
less five points or more for another seed; for metaoptnet-svm and variational-fsl that of ProtoNet on the same
tasks, 65.1, less seven. It shows that a system learns, not that it is better than another.
Systems that are recorded already are not trained again; --again trains them all.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import torchemo
from torchemo.runs.environment import environment
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, score_tasks

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks/results/systems.json", ROOT / "docs/systems.md"
OMNIGLOT = {"data.channels": 1, "data.rotations": True, "data.scheme": "vinyals_class_index"}
CIFAR = {"data.scheme": "cifar_fs", "data.drop_duplicates": True}
SETS = {
    "Omniglot": ("omniglot28.npz", 28, OMNIGLOT),
    "CIFAR-FS": ("cifar100_32.npz", 32, CIFAR),
}
CHECKS = {
    # system: set, shots, steps, accuracy in percent that it should reach
    "protonet": ("Omniglot", 1, 200, 83),
    "matchingnet": ("Omniglot", 1, 200, 81),
    "relationnet": ("Omniglot", 1, 400, 83),
    "can": ("Omniglot", 1, 400, 82),
    "tapnet": ("Omniglot", 1, 400, 78),
    "snail": ("Omniglot", 1, 400, 38),
    "dense-cosine": ("CIFAR-FS", 1, 600, 44),
    "mtl": ("CIFAR-FS", 5, 200, 58),
    "dynamic-fs": ("CIFAR-FS", 1, 200, 42.5),
    "tadam": ("CIFAR-FS", 5, 600, 63),
    "ctm": ("CIFAR-FS", 1, 300, 40),
    "metaoptnet-ridge": ("CIFAR-FS", 1, 600, 44),
    "metaoptnet-svm": ("CIFAR-FS", 5, 600, 58),
    "variational-fsl": ("CIFAR-FS", 5, 600, 58),
}
OPTIONS = {"model.filters": 32, "data.n_query": 5, "train.tasks": 4, "train.validation_tasks": 50}
TASKS = 400
BEGIN, END = "<!-- table: checks -->", "<!-- end -->"


def measured(data, name):
    """Train one system and score it on test tasks, each query by itself."""
    torch.set_num_threads(1)
    images, shots, steps, wanted = CHECKS[name]
    file, size, scheme = SETS[images]
    with tempfile.TemporaryDirectory() as folder:
        out, began = f"{folder}/run", time.process_time()
        options = {**OPTIONS, **scheme, "train.validate_every": steps}
        given = {"options": options, "steps": steps, "seed": 0, "size": size, "shot": shots}
        torchemo.train(name, data=data / file, out=out, **given)
        seconds, run = time.process_time() - began, load_best(Path(out))
        found = score_tasks(run, Protocol(tasks=TASKS), every_step=False)["summary"]["last"]
    about = {"system": name, "set": images, "shots": shots, "steps": steps, "wanted": wanted}
    low, high = (round(100 * found[end], 2) for end in ("low", "high"))
    value = round(100 * found["value"], 2)
    return {**about, "accuracy": value, "interval": [low, high], "cpu_seconds": round(seconds, 1)}


def table(rows):
    """Write the checks as a table of Markdown."""
    lines = [
        "| system | tasks | steps | should reach | accuracy | CPU s to train |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for r in sorted(rows, key=lambda r: list(CHECKS).index(r["system"])):
        tasks = f"{r['set']}, 5-way {r['shots']}-shot"
        mark = "" if r["accuracy"] >= r["wanted"] else " (missed)"
        wanted, got = f"{r['wanted']} %", f"{r['accuracy']:.1f} %{mark}"
        cells = [f"`{r['system']}`", tasks, r["steps"], wanted, got, f"{r['cpu_seconds']:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def saved(rows):
    """Write the record and the table of the page."""
    settings = {"options": OPTIONS, "tasks": TASKS, "seed": 0, "environment": environment()}
    RECORD.write_text(json.dumps({"settings": settings, "checks": rows}, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


def main():
    """Run the checks that are not recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the image sets")
    parser.add_argument("--again", action="store_true", help="train all of them again")
    given = parser.parse_args()
    rows = []
    if RECORD.exists() and not given.again:
        rows = json.loads(RECORD.read_text())["checks"]
    for name in CHECKS:
        if name not in {row["system"] for row in rows}:
            rows.append(measured(given.data, name))
            print(rows[-1], flush=True)
            saved(rows)


if __name__ == "__main__":
    main()
