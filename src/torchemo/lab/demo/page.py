"""The report of the demo: fitted curves first, then errors by visit."""

from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from matplotlib.axes import Axes

from torchemo.lab.demo.findings import Found, meaning, sentences
from torchemo.lab.demo.methods import (
    BASE,
    EMO,
    OFFSETS,
    OFFSETS_EMO,
    REPLAY,
    SLOPES,
    STRANGERS,
    Measured,
)
from torchemo.lab.demo.runs import SHOTS
from torchemo.report.figures import Line, lines
from torchemo.report.page import render
from torchemo.report.svg import INK, MUTED, PAPER, SERIES, WIDTH, draw
from torchemo.runs.folder import RunFolder

COLOURS = {BASE: 7, SLOPES: 5, EMO: 0, STRANGERS: 3, REPLAY: 2, OFFSETS: 1, OFFSETS_EMO: 4}
SHOWN = (BASE, EMO, OFFSETS_EMO)
"""Fits in the figures."""


def write_page(
    measured: Measured, found: Found, families: tuple[str, ...], *, steps: int, out: Path
) -> Path:
    """Write the report as one HTML file."""
    text = render(
        "demo.html.j2",
        title="Curves that come back",
        headline=sentences(found)[0],
        meaning=meaning(found),
        sentences=sentences(found)[1:],
        pictures=_pictures(measured, families),
        returning=_by_visit(found, (BASE, SLOPES, EMO, STRANGERS, REPLAY), name="returning"),
        starts=_by_visit(found, (BASE, OFFSETS, OFFSETS_EMO), name="starts"),
        rows=_rows(found),
        found=found,
        shots=SHOTS,
        steps=steps,
    )
    RunFolder(out.parent).save(out, text)
    return out


def _pictures(measured: Measured, families: tuple[str, ...]) -> list[dict[str, Any]]:
    """Draw the first curve of each family at the last visit: first, so that none is picked."""
    domains = measured.visits[0].domain
    if domains is None:
        return []
    first = {int(d): i for i, d in reversed(list(enumerate(domains.tolist())))}
    return [
        {
            "family": families[domain],
            "svg": _picture(measured, curve, families[domain]),
            "errors": [(name, float(measured.errors[name][-1, curve])) for name in SHOWN],
        }
        for domain, curve in sorted(first.items())
    ]


def _picture(measured: Measured, curve: int, family: str) -> Markup:
    last = measured.visits[-1]
    x = last.query.x[curve, :, 0]
    order = x.argsort()
    past = [(v.support.x[curve, :, 0], v.support.y[curve, :, 0]) for v in measured.visits]

    def drawing(axes: Axes) -> None:
        truth = last.query.y[curve, order, 0].numpy()
        axes.plot(
            x[order].numpy(), truth, color=INK, linewidth=1, linestyle=(0, (2, 2)), label="curve"
        )
        for name, width in zip(SHOWN, (1.4, 2.2, 2.2), strict=True):
            fit = measured.answers[name][curve, order].numpy()
            colour, label = SERIES[COLOURS[name]], name.removeprefix("MAML + ")
            axes.plot(x[order].numpy(), fit, color=colour, linewidth=width, label=label)
        earlier = [torch.cat(part).numpy() for part in zip(*past[:-1], strict=True)]
        axes.plot(
            *earlier,
            "o",
            markersize=4,
            color=PAPER,
            markeredgecolor=MUTED,
            label="earlier points, not kept",
        )
        axes.plot(
            *(p.numpy() for p in past[-1]),
            "o",
            markersize=6,
            color=INK,
            label="points of this visit",
        )
        axes.set_xlabel("input")
        axes.set_ylabel("target")

    alt = f"A {family} at visit {len(past)}: the curve, its points, and three fits."
    return draw(drawing, name=f"fit-{family}", alt=alt, size=(WIDTH, 3.1), legend=True)


def _by_visit(found: Found, names: tuple[str, ...], *, name: str) -> Markup:
    visits = list(range(1, found["visits"] + 1))
    shown = [
        Line(
            method,
            visits,
            [e["value"] for e in found["errors"][method]],
            [e["low"] for e in found["errors"][method]],
            [e["high"] for e in found["errors"][method]],
            marked=True,
            colour=COLOURS[method],
        )
        for method in names
    ]
    alt = "Mean squared error by visit."
    return lines(shown, name=name, alt=alt, x="visit", y="mean squared error", log=True, whole=True)


def _rows(found: Found) -> list[dict[str, Any]]:
    return [
        {"name": name, "means": [f"{e['value']:.2f}" for e in row], "strong": name == EMO}
        for name, row in found["errors"].items()
    ]
