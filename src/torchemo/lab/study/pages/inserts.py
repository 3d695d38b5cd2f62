"""Tables of recorded studies in a page that people write: the words are theirs, the numbers are not.

A page says where a table goes, and from which record and rows it is made::

    <!-- study T1-cpu-regression scores: maml; maml-offsets -->
    <!-- end -->
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from torchemo.core.errors import DataError
from torchemo.lab.study.catalogue import ENTRIES
from torchemo.lab.study.pages.cost import compared
from torchemo.lab.study.pages.table import Table
from torchemo.lab.study.pages.tables import (
    contrast_table,
    gains_by_set,
    grid,
    recall_table,
    recalled_table,
    score_tables,
)
from torchemo.lab.study.pages.visit_tables import (
    found_by_visit,
    kept_by_visit,
    last_by_set,
    scores_by_visit,
)
from torchemo.lab.study.records import read_result

_PLACE = re.compile(
    r"(?P<begin><!-- study (?P<record>\S+) (?P<kind>\w+): (?P<rows>[^>]*?) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
_Made: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], Table]
_OF_CONTRASTS: Mapping[str, _Made] = {"contrasts": contrast_table, "gains": gains_by_set}
_OF_CELLS: Mapping[str, _Made] = {
    "scores": lambda cells: score_tables(cells)[0],
    "elsewhere": lambda cells: score_tables(cells)[1],
    "recalls": recall_table,
    "recalled": recalled_table,
    "visits": scores_by_visit,
    "found": found_by_visit,
    "last": last_by_set,
    "kept": kept_by_visit,
}


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
            note += f": `{result['command']}`" + "".join(f" ({how})" for how in answered(result))
        return "\n".join([place["begin"], *grid(found), "", note, "", place["end"]])

    return _PLACE.sub(table, page)


def answered(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Say how queries are answered where it matters: networks of images may normalise all of them at once."""
    images = result["tasks"] == "images" and result["entry"] in ENTRIES
    return (ENTRIES[result["entry"]].statistics,) if images else ()


def _table(result: Mapping[str, Any], kind: str, patterns: Sequence[str]) -> Table:
    if kind == "compared":
        return compared(result, _chosen(result["cells"], patterns))
    if kind in _OF_CONTRASTS:
        return _OF_CONTRASTS[kind](_chosen(result["contrasts"], patterns))
    if kind not in _OF_CELLS:
        names = ", ".join((*_OF_CELLS, *_OF_CONTRASTS, "compared"))
        raise DataError(f"there are no tables of {kind}.", hint=f"There are: {names}.")
    return _OF_CELLS[kind](_chosen(result["cells"], patterns))


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
