"""The paper's own figures, redrawn from the numbers that were read off them."""

import numpy as np
from markupsafe import Markup

from torchemo.lab.study.entry import Entry
from torchemo.lab.study.pages.drawings import matrix, over_steps, sweep
from torchemo.lab.study.paper.published import Published, value
from torchemo.report.figures import Line

_SETS = ("Bird", "Texture", "Aircraft", "Fungi")


def paper_figures(entry: Entry) -> list[tuple[str, Markup]]:
    """Return the paper's version of an entry's figure with its caption; none for tables and F1."""
    published = entry.published
    if entry.figure in ("steps", "bars") and published.read_off:
        y = "ms" if entry.figure == "bars" else "accuracy (%)"
        drawn = over_steps(_rows(published), name="paper", y=y)
        return [("The paper's figure, redrawn from readings.", drawn)]
    if entry.figure == "sweep":
        x = "slots T" if entry.name == "F3" else "neighbours k"
        drawn = sweep(_rows(published), name="paper", x=x, y="accuracy (%)")
        return [("The paper's figure (miniImageNet), redrawn from readings.", drawn)]
    if entry.figure == "matrix":
        base, memory = (_cross(published, column) for column in ("MAML", "MAML+EMO"))
        shown = (
            matrix(base, _SETS, name="paper")
            if entry.name == "F4"
            else matrix(memory - base, _SETS, name="paper", signed=True)
        )
        words = "MAML" if entry.name == "F4" else "EMO minus MAML"
        return [(f"The paper: {words}, trained on (rows), tested on (columns).", shown)]
    return []


def _rows(published: Published) -> list[Line]:
    """Read a table whose header counts steps or sizes and whose rows are methods."""
    places = [float(text) for text in published.header[1:]]
    return [
        Line(row[0], places, [value(cell) for cell in row[1:]], marked=True, colour=number)
        for number, row in enumerate(published.rows)
    ]


def _cross(published: Published, column: str) -> np.ndarray:
    return np.array(
        [
            [published.mean(column, **{"trained on": a, "tested on": b}) for b in _SETS]
            for a in _SETS
        ]
    )
