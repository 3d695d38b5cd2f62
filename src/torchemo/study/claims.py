"""What the paper claims, and what recorded results say about it."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torchemo.report.words import METRICS, number
from torchemo.study import published
from torchemo.study.entries import ENTRIES
from torchemo.study.entry import LITERAL, OURS, Entry
from torchemo.study.scales import FOUR
from torchemo.study.tables import estimate
from torchemo.study.verdict import Verdict, interval_of, judge

CLAIMS: MappingProxyType[str, str] = MappingProxyType(
    {
        "C1": "EMO is at least as good as MAML, ANIL and Meta-SGD alone.",
        "C2": "EMO needs fewer inner steps: one is better than five of SGD.",
        "C3": "LRU and CLOCK are better than FIFO, and FIFO is worse than no memory.",
        "C4": "The gain grows with the number of slots T and then saturates.",
        "C5": "The gain grows with the number of neighbours k up to 15 or 20 and is then flat.",
        "C6": "A memory of one domain helps in that domain and hurts in others.",
        "C7": "As inner optimizers EMO > SGD > Momentum > Adam.",
    }
)

MAX_LISTED = 6
"""More contrasts than these are counted instead of listed."""


class Finding(NamedTuple):
    """One row: what is claimed, and what one record says about it in one reading of EMO."""

    what: str
    reading: str
    paper: str
    ours: str
    verdict: Verdict


def claim_findings(claim: str, result: Mapping[str, Any]) -> list[Finding]:
    """Return what a result says about a claim, one finding per reading that it has contrasts for."""
    contrasts = [c for c in result["contrasts"] if claim in c["claims"]]
    return _by_reading(CLAIMS[claim], contrasts, result)


def entry_findings(result: Mapping[str, Any]) -> list[Finding]:
    """Return what a result says about its table or figure."""
    entry = ENTRIES[result["entry"]]
    special = {"T6": _t6, "F1": _f1, "F4": _f4, "F6": _f6}
    if entry.name in special:
        return [special[entry.name](entry, result)]
    controls = _control_names(result)
    claimed = [
        c
        for c in result["contrasts"]
        # What the paper claims counts, also of cells that share their rates, as its own do.
        if c["claims"] or (c["expect"] != "shown" and c["against"] not in controls)
    ]
    if entry.name == "T1":  # it speaks of every data set
        claimed = [{**c, "verdict": _on_every_domain(c)} for c in claimed]
    found = _by_reading(entry.says, claimed, result)
    if entry.name == "T5":  # the column it is about cannot be run
        found = [finding._replace(verdict="not testable here") for finding in found]
    return found


def _on_every_domain(contrast: Mapping[str, Any]) -> str:
    """Judge a contrast on all tasks and, over tasks, on each domain."""
    if contrast["diverged"] or contrast["verdict"] != "holds":
        return "does not hold"
    better = METRICS[contrast["metric"]].higher_is_better
    rows = [{"expect": "better", "over_tasks": row} for row in contrast["per_domain"].values()]
    held = [judge(row, higher_is_better=better) == "holds" for row in rows]
    return "holds" if all(held) else "does not hold"


def without_record(entry: Entry) -> Verdict:
    """Return the verdict of an entry that has no record: some need more than two cores."""
    testable = any(scale.startswith("cpu/") for scale in entry.scales)
    return "not run" if testable else "not testable here"


def _by_reading(
    what: str, contrasts: Iterable[Mapping[str, Any]], result: Mapping[str, Any]
) -> list[Finding]:
    cells = _cells(result)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    without: list[Mapping[str, Any]] = []
    for c in contrasts:
        cell = cells[c["cell"]]
        if "-emo" in cell["preset"]:
            groups.setdefault(reading_of(cell), []).append(c)
        else:
            without.append(c)
    if not groups and without:
        groups[""] = []
    for (
        group
    ) in groups.values():  # what is said of learners without memory is said beside either reading
        group += without
    # Controls are compared after all inner steps: they say nothing about fewer.
    by_step = ENTRIES[result["entry"]].figure == "steps"
    controls = {} if by_step else _controls(result)
    return [
        Finding(
            what,
            reading,
            _listed([(c["name"], _points(c)) for c in group if c["paper"] is not None]),
            _ours(group) + controls.get(reading, ""),
            "holds" if all(c["verdict"] == "holds" for c in group) else "does not hold",
        )
        for reading, group in groups.items()
    ]


def _controls(result: Mapping[str, Any]) -> dict[str, str]:
    """Say how many controls the cells of each reading beat."""
    cells = _cells(result)
    controls = _control_names(result)
    found: dict[str, list[bool]] = {}
    for c in result["contrasts"]:
        if c["against"] in controls and c["expect"] != "shown" and not c["claims"]:
            found.setdefault(reading_of(cells[c["cell"]]), []).append(c["verdict"] == "holds")
    return {
        reading: f"; better than {sum(beaten)} of {len(beaten)} controls"
        for reading, beaten in found.items()
    }


def reading_of(cell: Mapping[str, Any]) -> str:
    """Name the reading of EMO that a recorded cell with memory has."""
    by_preset = OURS if cell["preset"].endswith("-emo") else LITERAL
    return cell.get("reading") or by_preset


def _control_names(result: Mapping[str, Any]) -> set[str]:
    """Name the controls, and the variants of a cell that keep its rates, such as one that trains longer."""
    presets = {cell["name"]: cell["preset"] for cell in result["cells"]}
    return {
        cell["name"]
        for cell in result["cells"]
        if cell["role"] == "control" or presets.get(cell.get("of")) == cell["preset"]
    }


def _ours(contrasts: list[Mapping[str, Any]]) -> str:
    if len(contrasts) > MAX_LISTED:
        held = sum(c["verdict"] == "holds" for c in contrasts)
        return f"{held} of {len(contrasts)} contrasts as claimed"
    return _listed([(c["name"], _interval(c)) for c in contrasts])


def _interval(contrast: Mapping[str, Any]) -> str:
    if contrast["diverged"]:
        return f"{' and '.join(contrast['diverged'])} diverged"
    found = estimate(interval_of(contrast), contrast["metric"], sign=True)
    return f"{found} {'points' if contrast['metric'] == 'accuracy' else 'MSE'}"


def _points(contrast: Mapping[str, Any]) -> str:
    return number(contrast["paper"], sign=True, decimals=2)


def _listed(parts: list[tuple[str, str]]) -> str:
    if len(parts) > MAX_LISTED:
        values = [text for _, text in parts]
        return f"{len(values)} numbers, {min(values, key=_value)} to {max(values, key=_value)}"
    return "; ".join(f"{name}: {text}" for name, text in parts)


def _value(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-"))


def _cells(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {cell["name"]: cell for cell in result["cells"]}


def _verdict(holds: bool) -> Verdict:
    return "holds" if holds else "does not hold"


def _t6(entry: Entry, result: Mapping[str, Any]) -> Finding:
    """Judge the parameters that EMO adds to MAML."""
    added = _cells(result)["maml-emo-paper"]["cost"]["emo_parameters"]
    printed = 1e6 * published.T6.mean("extra M parameters", method="MAML", optimiser="EMO")
    paper = f"{printed:,.0f} parameters added to MAML"
    return Finding(entry.says, LITERAL, paper, f"{added:,}", _verdict(added <= 2 * printed))


def _f1(entry: Entry, result: Mapping[str, Any]) -> Finding:
    names = ("maml-emo-paper", "maml", "maml momentum", "maml adam")
    cells = _cells(result)
    last = {name: cells[name]["curve"]["loss"][-1][1] for name in names}
    emo, sgd, *others = (last[name] for name in names)
    text = "; ".join(f"{name}: {number(value)}" for name, value in last.items())
    holds = emo < sgd < min(others)
    return Finding(entry.says, LITERAL, "no numbers", text, _verdict(holds))


def _f4(entry: Entry, result: Mapping[str, Any]) -> Finding:
    cells = [cell for cell in result["cells"] if cell["world"] in FOUR]
    right, total = 0, 0
    for tested in (cell["world"] for cell in cells):
        column = {c["world"]: c["tests"][tested] for c in cells if tested in c["tests"]}
        sign = 1 if METRICS[column[tested]["metric"]].higher_is_better else -1
        best = max(column, key=lambda world: sign * column[world]["mean"]["value"])
        right, total = right + (best == tested), total + 1
    text = f"on {right} of {total} sets the learner trained there is the best"
    return Finding(entry.says, LITERAL, "on 4 of 4", text, _verdict(right == total))


def _f6(entry: Entry, result: Mapping[str, Any]) -> Finding:
    cells = _cells(result)

    def step(name: str) -> float:
        times = sorted(cells[name]["cost"]["inner_ms"][1:])
        return float(times[len(times) // 2])

    ratio = step("maml-emo-paper") / step("maml")
    text = f"{ratio:.2f} times the step of SGD"
    return Finding(entry.says, LITERAL, "1.5 times the step of SGD", text, _verdict(ratio <= 2))
