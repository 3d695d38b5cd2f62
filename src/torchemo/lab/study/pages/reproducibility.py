"""Every claim, table and figure of the paper on a page, beside what we recorded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchemo.core.errors import DataError
from torchemo.lab.study.catalogue import ENTRIES
from torchemo.lab.study.entry import LIFELONG
from torchemo.lab.study.pages.inserts import answered
from torchemo.lab.study.pages.table import Table
from torchemo.lab.study.pages.tables import grid
from torchemo.lab.study.paper.claims import (
    CLAIMS,
    Finding,
    claim_findings,
    entry_findings,
    without_record,
)
from torchemo.lab.study.records import read_result
from torchemo.lab.study.scales import SCALES
from torchemo.lab.study.verdict import OTHER_RULES, RULE, VERDICTS

COLUMNS = ("variant", "paper", "ours [95 %]", "verdict", "record")
GLANCE_COLUMNS = ("claim", "says", "where every task is new", "where tasks come back")
RECORD_COLUMNS = ("record", "data and scale", "seeds", "command")

_HEAD = """# Reproducibility

Every claim, table and figure of the paper, beside what we recorded. `make reproducibility` writes
this page from the files in `{folder}/`; do not edit it.

A record holds every cell with its rates, seeds, runs and controls. The scores of every test task
lie beside it (`.npz`). The commands are in the last table. Differences are points of accuracy
(higher is better) or mean squared error (lower is better). On images, all queries of a task are
answered together (*transductive*, the habit of MAML's papers) or each by itself (*inductive*).

Variants of EMO:

- *mixed* (cells `-emo-mixed`): as printed, but stored gradients are summed over the support set and
  the own gradient is averaged. Its rates are tuned on the same grid as those of the base learner.
- *repaired*: the same without what R1 finds to break it.
- *emo* (preset `-emo`): Sum at the first inner step.
- *offsets*: our memory. It trains jointly with the learner (preset `-offsets-joint`), and in R7
  after it (`-offsets`).
- *lifelong*: gradients of past visits, where tasks come back (studies L1 to L7). *Named*: the user
  names the classes. *Told*: somebody says which task it is. *By images*: nobody says anything.
  *Random*: visits of other tasks.
"""


def reproducibility(records: Path) -> str:
    """Write the page from recorded results; it links records from a folder beside theirs."""
    if not records.is_dir():
        raise DataError(
            f"{records} is not a folder of recorded studies.",
            hint="Record one there: torchemo study record NAME --to FOLDER",
        )
    results = {path.name: read_result(path) for path in sorted(records.glob("*.json"))}
    results = {name: result for name, result in results.items() if result["scale"] != "smoke"}
    links = {name: f"[{name}](../{records.name}/{name})" for name in results}
    claims = {
        claim: {name: claim_findings(claim, result) for name, result in results.items()}
        for claim in CLAIMS
    }
    lines = [*_HEAD.format(folder=records.name).splitlines(), "", "## At a glance", ""]
    lines += [*_glance(claims), "", "## Claims", ""]
    for claim, text in CLAIMS.items():
        lines += _part(claim, text, _of_kind(claims[claim], False), links, without="not run")
        lines += ["Where tasks come back:", ""]
        lines += _rows(_of_kind(claims[claim], True), links, without="not run")
    lines += ["## Tables and figures", ""]
    for entry in (entry for entry in ENTRIES.values() if entry.in_paper):
        own = {n: result for n, result in results.items() if result["entry"] == entry.name}
        found = {name: entry_findings(result) for name, result in own.items()}
        lines += _part(entry.name, entry.says, found, links, without=without_record(entry))
    rows = [(links[name], *_about(result)) for name, result in results.items()]
    lines += ["## Records", "", *grid(Table("", RECORD_COLUMNS, rows)), ""]
    lines += ["## Rules", "", RULE, "", OTHER_RULES]
    return "\n".join(lines) + "\n"


def _part(
    name: str,
    says: str,
    found: Mapping[str, Sequence[Finding]],
    links: Mapping[str, str],
    *,
    without: str,
) -> list[str]:
    """Write what the paper says, and under it what each record says about it."""
    return [f"### {name}", "", says, "", *_rows(found, links, without=without)]


def _rows(
    found: Mapping[str, Sequence[Finding]], links: Mapping[str, str], *, without: str
) -> list[str]:
    rows = [
        (one.variant, one.paper, one.ours, f"**{one.verdict}**", links[record])
        for record, findings in found.items()
        for one in findings
    ]
    table = grid(Table("", COLUMNS, rows)) if rows else [f"**{without}**"]
    return [*table, ""]


def _of_kind(found: Mapping[str, Sequence[Finding]], comes_back: bool) -> dict[str, list[Finding]]:
    """Return the findings about tasks that come back, or all others."""
    return {
        record: [one for one in findings if one.variant.startswith(LIFELONG) == comes_back]
        for record, findings in found.items()
    }


def _glance(claims: Mapping[str, Mapping[str, Sequence[Finding]]]) -> list[str]:
    """Count the verdicts on each claim, where every task is new and where tasks come back."""
    rows = []
    for claim, found in claims.items():
        usual = [one for group in _of_kind(found, False).values() for one in group]
        back = [one for group in _of_kind(found, True).values() for one in group]
        by_finder: dict[str, list[Finding]] = {}
        for one in back:
            by_finder.setdefault(one.variant.removeprefix(f"{LIFELONG}, "), []).append(one)
        texts = [f"{finder}: {_counted(group)}" for finder, group in by_finder.items()]
        rows.append((claim, CLAIMS[claim], _counted(usual), "; ".join(texts) or "not run"))
    return grid(Table("", GLANCE_COLUMNS, rows))


def _counted(found: Sequence[Finding]) -> str:
    if not found:
        return "not run"
    counts = Counter(one.verdict for one in found)
    words = [f"{verdict} in {counts[verdict]}" for verdict in VERDICTS if counts[verdict]]
    return f"{', '.join(words)} of {len(found)}" if len(found) > 1 else found[0].verdict


def _about(result: Mapping[str, Any]) -> tuple[str, str, str]:
    seeds = ", ".join(map(str, result["seeds"]))
    about = ", ".join((_data(result), result["scale"], *answered(result)))
    return about, seeds, f"`{result['command']}`"


def _data(result: Mapping[str, Any]) -> str:
    """Name the data; our four image sets are stand-ins and must not pass for the paper's."""
    mixed = tuple(result["worlds"].get("mixed", ()))
    if mixed == SCALES["cpu/images"].worlds["mixed"]:
        return "BTAF-like images, 32 px"
    sets = [name for sets in result["worlds"].values() for name in sets]
    names = ", ".join(dict.fromkeys(sets))
    return f"{names} (the paper has no regression)" if result["tasks"] == "regression" else names
