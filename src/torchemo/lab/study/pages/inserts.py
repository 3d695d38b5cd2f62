"""Tables of recorded studies in a page that people write: the words are theirs, the numbers are not.

A page says where a table goes, and from which record and rows it is made::

    <!-- study T1-cpu-regression scores: maml; maml-offsets -->
    <!-- end -->
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torchemo.core.errors import DataError
from torchemo.lab.study.pages.tables import (
    Table,
    contrast_table,
    grid,
    recall_table,
    recalled_table,
    score_tables,
)
from torchemo.lab.study.records import read_result

_PLACE = re.compile(
    r"(?P<begin><!-- study (?P<record>\S+) (?P<kind>\w+): (?P<rows>[^>]*?) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
_KINDS = ("scores", "contrasts", "recalls", "recalled")


def with_tables(page: str, records: Path) -> str:
    """Return a page with all its tables made anew from the records.

    The command behind a record stands under its first table alone: some have many cells.
    """
    told: set[Path] = set()

    def table(place: re.Match[str]) -> str:
        path = records / f"{place['record']}.json"
        result = read_result(path)
        found = _table(result, place["kind"], [p.strip() for p in place["rows"].split(";")])
        note = f"[{path.name}](../{records.name}/{path.name})"
        if path not in told:
            told.add(path)
            note += f": `{result['command']}`"
        return "\n".join([place["begin"], *grid(found), "", note, "", place["end"]])

    return _PLACE.sub(table, page)


def _table(result: Mapping[str, Any], kind: str, patterns: Sequence[str]) -> Table:
    if kind not in _KINDS:
        raise DataError(f"there are no tables of {kind}.", hint=f"There are: {', '.join(_KINDS)}.")
    if kind == "contrasts":
        return contrast_table(_chosen(result["contrasts"], patterns))
    cells = _chosen(result["cells"], patterns)
    if kind == "recalled":
        return recalled_table(cells)
    return recall_table(cells) if kind == "recalls" else score_tables(cells)[0]


def _chosen(items: Sequence[Mapping[str, Any]], patterns: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return what has such names, in the order in which it is asked for."""
    found = []
    for pattern in patterns:
        named = [item for item in items if fnmatchcase(item["name"], pattern)]
        if not named:
            names = ", ".join(item["name"] for item in items)
            raise DataError(f"there is no '{pattern}' in the record.", hint=f"There are: {names}.")
        found += named
    return found
