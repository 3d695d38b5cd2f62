"""Measure what it takes to compute the features of images once.

python benchmarks/features.py --data ../shared/data      (one minute on one core; needs the extra pretrained)

Packs the features of some images of a set at two sizes, on one core, and writes CPU time per image to
benchmarks/results/features.json and to docs/pretrained.md. Opening what is packed is measured beside it.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from torchemo.config.registry import Part
from torchemo.core.allocator import keep_memory
from torchemo.data.features import pack_features
from torchemo.data.load import find
from torchemo.data.packed import open_packed
from torchemo.models import frozen_network
from torchemo.runs.environment import environment

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks/results/features.json", ROOT / "docs/pretrained.md"
NETWORK, SIZES, SET, CLASSES = "efficientnet-lite0", (160, 224), "birds84.zip", 6
BEGIN, END = "<!-- table: features -->", "<!-- end: features -->"


def measured(listing, size):
    """Pack once; CPU seconds of all images, and of opening what was packed."""
    network = frozen_network(Part(NETWORK, {"size": size}))
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        report = pack_features(listing, Path(folder) / "packed", network)
        packed = time.process_time()
        open_packed(Path(folder) / "packed")
        opened = time.process_time() - packed
    return {
        "size": size,
        "images": report.images,
        "cpu_ms_per_image": round(1000 * (packed - began) / report.images, 1),
        "cpu_ms_to_open": round(1000 * opened, 1),
    }


def table(rows):
    """Write the rows as a table of Markdown."""
    lines = ["| network | size | images | CPU ms per image | CPU ms to open all |"]
    lines.append("|---|---:|---:|---:|---:|")
    for row in rows:
        cells = (row["size"], row["images"], row["cpu_ms_per_image"], row["cpu_ms_to_open"])
        lines.append(f"| {NETWORK} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main():
    """Measure, then write record and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    whole = find(given.data / SET)
    listing = replace(whole, classes=whole.classes[:CLASSES])
    rows = [measured(listing, size) for size in SIZES]
    about = {"network": NETWORK, "set": SET, "environment": environment()}
    RECORD.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
