"""REPRODUCIBILITY.md: every claim, table and figure of the paper beside what we recorded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchemo.core.errors import DataError
from torchemo.lab.study.catalogue import ENTRIES
from torchemo.lab.study.pages.tables import Table, grid
from torchemo.lab.study.paper.claims import (
    CLAIMS,
    Finding,
    claim_findings,
    entry_findings,
    without_record,
)
from torchemo.lab.study.records import read_result
from torchemo.lab.study.scales import SCALES
from torchemo.lab.study.verdict import OTHER_RULES, RULE

COLUMNS = (
    "",
    "the paper says",
    "variant of EMO",
    "paper",
    "ours [95 %]",
    "data and scale",
    "seeds",
    "command",
    "record",
    "verdict",
)

_HEAD = """# Reproducibility

Written by `make reproducibility` from the files in `{folder}/`; do not edit. One row per claim, table and
figure of the paper and per recorded study of it. Each record holds every cell with its rates, seeds, runs
and controls; the scores of every test task lie beside it (`.npz`). Variants of EMO: *mixed* is what the paper
prints with one difference, stored gradients are summed over the support set and the own gradient is averaged
(cells `-emo-mixed`, rates tuned on the same grid as the base learner's). *repaired* is the same without what
R1 finds to break it. *offsets* is our memory, trained together with the learner (preset `-offsets-joint`), in
R7 after it (`-offsets`). Differences are points of accuracy (higher is better) or mean squared error (lower
is better).
"""


def reproducibility(records: Path) -> str:
    """Write the page from recorded results."""
    if not records.is_dir():
        raise DataError(
            f"{records} is not a folder of recorded studies.",
            hint="Record one there: torchemo study record NAME --to FOLDER",
        )
    results = {path.name: read_result(path) for path in sorted(records.glob("*.json"))}
    results = {name: result for name, result in results.items() if result["scale"] != "smoke"}
    lines = _HEAD.format(folder=records.name).splitlines()
    lines += ["", "## Claims", "", *grid(Table("", COLUMNS, _claims(results, records))), ""]
    lines += ["## Tables and figures", "", *grid(Table("", COLUMNS, _entries(results, records)))]
    lines += ["", "## Rules", "", RULE, "", OTHER_RULES]
    return "\n".join(lines) + "\n"


def _claims(results: Mapping[str, Mapping[str, Any]], records: Path) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for claim, text in CLAIMS.items():
        found = [
            _row(claim, finding, result, name, records)
            for name, result in results.items()
            for finding in claim_findings(claim, result)
        ]
        rows += found or [_empty(claim, text, "not run")]
    return rows


def _entries(results: Mapping[str, Mapping[str, Any]], records: Path) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for entry in ENTRIES.values():
        if not entry.in_paper:
            continue
        found = [
            _row(entry.name, finding, result, name, records)
            for name, result in results.items()
            if result["entry"] == entry.name
            for finding in entry_findings(result)
        ]
        rows += found or [_empty(entry.name, entry.says, without_record(entry))]
    return rows


def _row(
    name: str, finding: Finding, result: Mapping[str, Any], file: str, records: Path
) -> tuple[str, ...]:
    return (
        name,
        finding.what,
        finding.variant,
        finding.paper,
        finding.ours,
        f"{_data(result)}, {result['scale']}",
        ", ".join(map(str, result["seeds"])),
        f"`{result['command']}`",
        f"[{file}]({records.name}/{file})",
        f"**{finding.verdict}**",
    )


def _empty(name: str, says: str, verdict: str) -> tuple[str, ...]:
    return (name, says, *("",) * (len(COLUMNS) - 3), f"**{verdict}**")


def _data(result: Mapping[str, Any]) -> str:
    """Name the data; our four image sets are stand-ins and must not pass for the paper's."""
    mixed = tuple(result["worlds"].get("mixed", ()))
    if mixed == SCALES["cpu/pictures"].worlds["mixed"]:
        return "BTAF-like images, 32 px"
    names = _names([name for sets in result["worlds"].values() for name in sets])
    return f"{names} (the paper has no regression)" if result["tasks"] == "regression" else names


def _names(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))
