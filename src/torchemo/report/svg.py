"""Figures as inline SVG: equal inputs give equal text, colours and fonts are those of the page."""

import io
import re
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#23272e", "#6a7280", "#e2e5ea", "#fefefe"
SERIES = (
    "#0b6fae",
    "#cf5a12",
    "#0f8f6c",
    "#b0569a",
    "#b98a05",
    "#3aa3d9",
    "#7a63d1",
    "#7d7d7d",
)
"""Colours that differ for colour-blind readers too; the style sheet has a darker and a lighter set."""

_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
} | {colour: f"var(--s{i})" for i, colour in enumerate(SERIES)}

_STYLE: MappingProxyType[Any, Any] = MappingProxyType(
    {
        "svg.fonttype": "none",
        "text.parse_math": False,  # a dollar sign in a name is a dollar sign
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.labelsize": 10,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": MUTED,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.use_mathtext": False,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "path.simplify": True,
    }
)

WIDTH = 4.6
"""Width of a figure in inches: at 72 units an inch its text is readable in a window of 400 pixels."""

_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def draw(
    drawing: Callable[[Axes], None],
    *,
    name: str,
    alt: str,
    size: tuple[float, float] = (WIDTH, 2.9),
    legend: bool = False,
) -> Markup:
    """Make a figure of one pair of axes.

    Args:
        drawing: Draws on the axes.
        name: Name of the figure, unique on its page: element ids are made from it.
        alt: What there is to see, for those who cannot.
        size: Width and height in inches.
        legend: Put a legend above the axes.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        # The browser has fonts for names that the measuring font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        axes = figure.add_subplot()
        drawing(axes)
        entries = axes.get_legend_handles_labels()
        if legend and entries[0]:
            columns = _columns(entries[1])
            figure.legend(*entries, loc="outside upper left", ncols=columns, handlelength=1.4)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=_NO_METADATA)
    return _inline(text.getvalue(), alt)


def standalone(figure: Markup) -> str:
    """Turn a figure of a page into a file of its own: colours of the page become colours of ours.

    It has a ground of its own, so that it can be read on a dark page too.
    """
    text = str(figure)
    for colour, variable in _VARIABLES.items():
        text = text.replace(variable, colour)
    fonts = 'text { font-family: "DejaVu Sans", sans-serif }'
    style = f"<style>svg {{ background: {PAPER} }} {fonts}</style>"
    head, body = text.split(">", 1)
    spaces = 'xmlns="http://www.w3.org/2000/svg"'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head} {spaces}>{style}{body}\n'


def short(name: str, *, length: int = 22) -> str:
    """Shorten a long name from a file, so that it leaves room for the figure."""
    return name if len(name) <= length else name[: length - 1] + "…"


def _columns(labels: list[str]) -> int:
    """Return how many entries stand side by side: about 60 letters fit a figure."""
    longest = max(len(label) for label in labels)
    return max(1, min(len(labels), 60 // (longest + 5)))


def _inline(text: str, alt: str) -> Markup:
    """Turn a whole SVG file into an element of a page."""
    view = re.search(r'viewBox="[\d. ]+"', text)
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    used = frozenset(re.findall(r'(?:url\(|href=")#([^)"]+)', body))
    # Tags only: names from files stand between them, and any text may look like an attribute.
    body = re.sub(r"<[^>]*>", lambda tag: _tag(tag.group(), used), body)
    # The body is matplotlib's, which escapes every text it is given.
    return Markup(  # noqa: S704
        f'<svg {view.group() if view else ""} role="img" aria-label="{escape(alt)}">{body}'
    )


def _tag(tag: str, used: frozenset[str]) -> str:
    """Drop ids that nothing refers to, which would repeat on a page; take colours and fonts from the page."""
    tag = re.sub(r' id="([^"]+)"', lambda m: m.group() if m.group(1) in used else "", tag)
    tag = tag.replace("xlink:href", "href").replace(" \n", " ")
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    for colour, variable in _VARIABLES.items():
        tag = tag.replace(colour, variable)
    return tag
