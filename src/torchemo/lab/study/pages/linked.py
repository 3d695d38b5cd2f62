"""Figures of records in pages that people write: a page links one, and it is drawn anew from the record."""

import re
from pathlib import Path

from torchemo.core.errors import DataError
from torchemo.lab.study.pages.figures import named_figures
from torchemo.lab.study.records import read_result
from torchemo.report.svg import standalone

_LINK = re.compile(
    r"\((?P<path>[^()\s]*figures/(?P<record>[A-Z]\d-\w+-\w+)-(?P<name>[\w-]+)\.svg)\)"
)


def linked_figures(page: str, folder: Path, records: Path) -> dict[Path, str]:
    """Return the figures that a page in ``folder`` links as ``figures/<record>-<name>.svg``, drawn anew."""
    found = {}
    for link in _LINK.finditer(page):
        drawn = named_figures(read_result(records / f"{link['record']}.json"))
        if link["name"] not in drawn:
            raise DataError(
                f"{link['record']} has no figure '{link['name']}'.",
                hint=f"It has: {', '.join(drawn) or 'none'}.",
            )
        found[folder / link["path"]] = standalone(drawn[link["name"]][1])
    return found
