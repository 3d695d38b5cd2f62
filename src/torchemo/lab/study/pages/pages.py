"""A result as files for people: a Markdown table, figures, one HTML page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchemo.lab.study.catalogue import ENTRIES
from torchemo.lab.study.pages.figures import figures
from torchemo.lab.study.pages.tables import about, markdown, tables
from torchemo.report.page import render
from torchemo.report.svg import standalone


def write_pages(folder: Path, result: Mapping[str, Any]) -> list[Path]:
    """Write ``table.md``, ``figure-N.svg`` and ``report.html`` beside ``result.json``."""
    entry = ENTRIES[result["entry"]]
    drawn = figures(result)
    texts = {"table.md": markdown(result)}
    for number, (_, figure) in enumerate(drawn, start=1):
        texts[f"figure-{number}.svg"] = standalone(figure)
    texts["report.html"] = render(
        "study.html.j2",
        title=f"{entry.name}: {entry.title}",
        sentence=entry.sentence,
        about=about(result),
        note=entry.note,
        synthetic=is_synthetic(result),
        figures=drawn,
        tables=tables(result),
        rule=result["rule"],
        command=result["command"],
    )
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def is_synthetic(result: Mapping[str, Any]) -> bool:
    """Return whether the tasks are drawn by formulas."""
    sets = [name for names in result["worlds"].values() for name in names]
    return any(name.startswith(("synthetic-", "regression:")) for name in sets)
