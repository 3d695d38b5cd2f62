"""Time steps of metric systems against forward and backward of the bare network, written plainly in torch.

python benchmarks/one_pass.py     (a minute on two idle cores)

Variants take turns within each round; a ratio is that of CPU times in the same round. The bare network runs
in torch's usual layout and channels last; the faster one counts. It has no head, no loss of a task and no
checks.
"""

import json
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from torchemo.config.registry import Part
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.lab.bench.clock import Variant, interleave, spread
from torchemo.learners import LEARNERS
from torchemo.models import Conv4, ResNet12
from torchemo.models.fused import keep_memory
from torchemo.runs.environment import environment
from torchemo.training.step import outer_step

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks/results/one_pass.json", ROOT / "docs/systems.md"
BEGIN, END = "<!-- table: one pass -->", "<!-- end of one pass -->"
WAY, SHOT, SIDE, REPEATS = 5, 1, 32, 5
CASES = {
    # network: tasks, queries per class, systems
    "conv4": (4, 15, ("protonet", "matchingnet", "metaoptnet-ridge", "tapnet")),
    "resnet12": (1, 5, ("protonet",)),
}


class Block(nn.Module):
    """A residual block of ResNet-12."""

    def __init__(self, inside, out):
        super().__init__()
        ends = ((inside, out), (out, out), (out, out))
        self.convs = nn.ModuleList(nn.Conv2d(*e, 3, padding=1, bias=False) for e in ends)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(4))
        self.short = nn.Conv2d(inside, out, 1, bias=False)

    def forward(self, x):
        """Apply three convolutions, add the shortcut, and halve the maps."""
        y = x
        for i, conv in enumerate(self.convs):
            y = self.norms[i](conv(y))
            y = F.leaky_relu(y, 0.1) if i < 2 else y
        return F.leaky_relu(F.max_pool2d(y + self.norms[3](self.short(x)), 2), 0.1)


def bare(network):
    """Return the network as one writes it in torch."""
    if network == "resnet12":
        widths = (3, 64, 128, 256, 512)
        return nn.Sequential(*(Block(*w) for w in pairwise(widths)))
    layers = []
    for i in range(4):
        conv = nn.Conv2d(64 if i else 3, 64, 3, padding=1)
        layers += [conv, nn.BatchNorm2d(64), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers)


def ours(network):
    """Return our network."""
    if network == "resnet12":
        return ResNet12(WAY, image_size=SIDE, channels="narrow", bn="running")
    return Conv4(WAY, image_size=SIDE, filters=64, bn="running")


def episode(tasks, queries):
    """Draw tasks of random images: the cost does not depend on what they show."""
    g = torch.Generator().manual_seed(0)

    def batch(n):
        y = torch.arange(WAY).repeat(n).expand(tasks, -1)
        return Batch(torch.rand(*y.shape, 3, SIDE, SIDE, generator=g), y)

    return Episode(batch(SHOT), batch(queries))


def variants(network):
    """Return the bare network in both layouts, and steps of every system."""
    tasks, queries, systems = CASES[network]
    drawn = episode(tasks, queries)
    x = torch.cat([drawn.support.x, drawn.query.x], 1).flatten(0, 1)
    found = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        net, images = bare(network).to(memory_format=layout), x.contiguous(memory_format=layout)

        def plain(net=net, images=images):
            net.zero_grad()
            net(images).mean((2, 3)).square().mean().backward()

        name = "channels last" if layout is torch.channels_last else "usual layout"
        found[f"bare network, {name}"] = Variant(plain)
    shape = TaskShape("classification", (3, SIDE, SIDE), WAY)
    for system in systems:
        for over in ("task", "batch"):
            kind, options = LEARNERS.resolve(Part(system, {"bn_over": over}))
            learner = kind.build(options, ours(network), shape)
            params = learner.init(torch.Generator().manual_seed(0))
            step = (lambda a, b: lambda: outer_step(a, b, drawn))(learner, params)
            found[f"{system}, bn_over = {over}"] = Variant(step)
    return found


def measured(network):
    """Time all variants of a network in turns."""
    times = interleave(variants(network), repeats=REPEATS)
    plain = [n for n in times if n.startswith("bare")]
    rounds = range(REPEATS)
    best = [min(times[n][i].cpu for n in plain) for i in rounds]
    return {
        name: {
            "cpu": spread([s.cpu for s in samples]),
            "ratio": spread([samples[i].cpu / best[i] for i in rounds]),
        }
        for name, samples in times.items()
    }


def table(cases):
    """Write the record as a table of Markdown."""
    lines = ["| network | step | CPU ms | of the faster bare network |", "|---|---|---:|---:|"]
    for network, rows in cases.items():
        for name, row in rows.items():
            ratio = row["ratio"]
            ends = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
            lines.append(f"| {network} | {name} | {1000 * row['cpu']['median']:.0f} | {ends} |")
    return "\n".join(lines)


def main():
    """Measure, write the record, and write its table into the page."""
    torch.set_num_threads(1)
    keep_memory()
    cases = {network: measured(network) for network in CASES}
    settings = {"cases": CASES, "way": WAY, "shot": SHOT, "side": SIDE, "repeats": REPEATS}
    record = {"settings": settings, "environment": environment(), "cases": cases}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(cases)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
