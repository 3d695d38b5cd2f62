"""What the paper claims, and what recorded results say about it."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NamedTuple

from torchemo.config.presets import parts_of
from torchemo.lab.study.catalogue import ENTRIES
from torchemo.lab.study.entry import LIFELONG, MIXED, OFFSETS, Contrast, Entry
from torchemo.lab.study.pages.cost import estimate
from torchemo.lab.study.paper.published import PUBLISHED
from torchemo.lab.study.scales import FOUR, scale_of
from torchemo.lab.study.streams.visits import finder_of
from torchemo.lab.study.verdict import Verdict, interval_of, over_tasks, together, verdict_of
from torchemo.report.format import METRICS, number

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
    """One row: what is claimed, and what one record says about it in one variant of EMO."""

    what: str
    variant: str
    paper: str
    ours: str
    verdict: Verdict


def claim_findings(claim: str, result: Mapping[str, Any]) -> list[Finding]:
    """Return what a result says about a claim, one finding per variant that it has contrasts for."""
    contrasts = [c for c in result["contrasts"] if claim in c["claims"]]
    wanted = [c.name for c in _planned(result) if claim in c.claims]
    return _by_variant(CLAIMS[claim], contrasts, result, wanted=wanted)


def entry_findings(result: Mapping[str, Any]) -> list[Finding]:
    """Return what a result says about its table or figure."""
    entry = ENTRIES[result["entry"]]
    special = {"T6": _t6, "F1": _f1, "F4": _f4, "F6": _f6}
    if entry.name in special:
        if not _needed(entry) <= _cells(result).keys():
            return [Finding(entry.says, MIXED, "", "not all of it was run", "undecided")]
        return [special[entry.name](entry, result)]
    controls = _control_names(result)
    # What the paper claims counts, also of cells that share their rates, as its own do.
    claimed = [
        c
        for c in result["contrasts"]
        if c["claims"] or (c["expect"] != "shown" and c["against"] not in controls)
    ]
    wanted = [
        c.name
        for c in _planned(result)
        if c.claims or (c.expect != "shown" and c.against not in controls)
    ]
    judge = _on_every_domain if entry.name == "T1" else verdict_of  # T1 speaks of every data set
    found = _by_variant(entry.says, claimed, result, wanted=wanted, judge=judge)
    if entry.name == "T5":  # the column it is about cannot be run
        found = [finding._replace(verdict="not testable here") for finding in found]
    return found


def _needed(entry: Entry) -> set[str]:
    """Name the cells without which an entry that draws no contrasts cannot be judged."""
    of_emo = {"maml", "maml-emo-mixed"}
    needed = {"T6": of_emo, "F6": of_emo, "F1": of_emo | {"maml momentum", "maml adam"}}
    return needed.get(entry.name, set())


def _on_every_domain(contrast: Mapping[str, Any]) -> str:
    """Judge a contrast on all tasks and, over tasks, on each domain."""
    domains = () if contrast["diverged"] else contrast["per_domain"]
    return together([verdict_of(contrast), *(over_tasks(contrast, domain) for domain in domains)])


def without_record(entry: Entry) -> Verdict:
    """Return the verdict of an entry that has no record: some need more than two cores."""
    testable = any(scale.startswith("cpu/") for scale in entry.scales)
    return "not run" if testable else "not testable here"


def _planned(result: Mapping[str, Any]) -> tuple[Contrast, ...]:
    """Return all contrasts of the entry that a result is of, also those that were not run."""
    return ENTRIES[result["entry"]].contrasts(scale_of(result["scale"], result["tasks"]))


def _by_variant(
    what: str,
    contrasts: Iterable[Mapping[str, Any]],
    result: Mapping[str, Any],
    *,
    wanted: Collection[str],
    judge: Callable[[Mapping[str, Any]], str] = verdict_of,
) -> list[Finding]:
    """Judge contrasts together, one finding per variant; ``wanted`` ones that are missing leave it open."""
    variants = _variants(result)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    without: list[Mapping[str, Any]] = []
    for c in contrasts:
        variant = variants[c["cell"]]
        (without if variant is None else groups.setdefault(variant, [])).append(c)
    if not groups and without:
        groups[""] = []
    for group in groups.values():
        group += without  # what is said of learners without memory is said beside every variant
    # Controls are compared after all inner steps: they say nothing about fewer.
    by_step = ENTRIES[result["entry"]].figure == "steps"
    controls = {} if by_step else _controls(result)
    missing = _missing(result, wanted)
    return [
        Finding(
            what,
            variant,
            _listed([(c["name"], _points(c)) for c in group if c["paper"] is not None]),
            _ours(group, judge) + _not_run(missing[variant]) + controls.get(variant, ""),
            together([*(judge(c) for c in group), *("undecided" for _ in missing[variant])]),
        )
        for variant, group in groups.items()
    ]


def _variants(result: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the variant of every cell of a result or of its entry; None without memory."""
    return {
        cell["name"]: None if cell["role"] == "base" else variant_of(cell)
        for cell in (*_planned_cells(result), *result["cells"])
    }


def _planned_cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    scale = scale_of(result["scale"], result["tasks"])
    return [asdict(cell) for cell in ENTRIES[result["entry"]].cells(scale)]


def _missing(result: Mapping[str, Any], wanted: Collection[str]) -> dict[str, list[str]]:
    """Name by variant the contrasts that a claim needs and that a result does not have."""
    drawn = {c["name"] for c in result["contrasts"]}
    variants = _variants(result)
    found: dict[str, list[str]] = {name or "": [] for name in (None, *variants.values())}
    for c in _planned(result):
        if c.name in wanted and c.name not in drawn:
            variant = variants[c.cell]
            for name in found if variant is None else (variant,):
                found[name].append(c.name)
    return found


def _not_run(names: list[str]) -> str:
    if len(names) > MAX_LISTED:
        return f"; {len(names)} more were not run"
    return "".join(f"; {name}: not run" for name in names)


def _controls(result: Mapping[str, Any]) -> dict[str, str]:
    """Say how many controls the cells of each variant beat; the runs of a base learner are none."""
    variants = _variants(result)
    controls = _control_names(result)
    cells = _cells(result)
    bases = [_run_ids(cell) for cell in cells.values() if cell["role"] == "base"]
    found: dict[str, list[bool]] = {}
    for c in result["contrasts"]:
        ids = _run_ids(cells[c["against"]])
        again = cells[c["against"]]["role"] == "control" and ids in bases
        if c["against"] in controls and c["expect"] != "shown" and not c["claims"] and not again:
            variant = variants[c["cell"]] or ""
            found.setdefault(variant, []).append(verdict_of(c) == "holds")
    return {
        variant: f"; better than {sum(beaten)} of {len(beaten)} controls"
        for variant, beaten in found.items()
    }


def _run_ids(cell: Mapping[str, Any]) -> list[str]:
    return [run["id"] for run in cell["runs"]]


def variant_of(cell: Mapping[str, Any]) -> str:
    """Name the variant of EMO that a recorded cell with memory has.

    A memory of tasks that come back is named with who finds its visits: a claim may hold where classes are
    named, and not where nobody names them.
    """
    if cell.get("variant") == LIFELONG and cell.get("visits"):
        return f"{LIFELONG}, {finder_of(cell['visits']['find'])}"
    by_preset = {"emo": "emo", "emo-paper": "paper", "offsets": OFFSETS, "offsets-joint": OFFSETS}
    _, memory = parts_of(cell["preset"])
    return cell.get("variant") or by_preset.get(memory or "", "")


def _control_names(result: Mapping[str, Any]) -> set[str]:
    """Name the controls, and the versions of a cell that keep its rates, such as one that trains longer.

    A learner that takes the rates chosen on other sets is no such version.
    """
    cells = [*_planned_cells(result), *result["cells"]]
    kinds = {cell["name"]: (cell["preset"], cell["world"]) for cell in cells}
    return {
        cell["name"]
        for cell in cells
        if cell["role"] == "control" or kinds.get(cell.get("of")) == kinds[cell["name"]]
    }


def _ours(contrasts: list[Mapping[str, Any]], judge: Callable[[Mapping[str, Any]], str]) -> str:
    if len(contrasts) > MAX_LISTED:
        held = sum(judge(c) == "holds" for c in contrasts)
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
    added = _cells(result)["maml-emo-mixed"]["cost"]["memory_parameters"]
    printed = 1e6 * PUBLISHED["T6"].mean("extra M parameters", method="MAML", optimiser="EMO")
    paper = f"{printed:,.0f} parameters added to MAML"
    return Finding(entry.says, MIXED, paper, f"{added:,}", _verdict(added <= 2 * printed))


def _f1(entry: Entry, result: Mapping[str, Any]) -> Finding:
    names = ("maml-emo-mixed", "maml", "maml momentum", "maml adam")
    cells = _cells(result)
    last = {name: cells[name]["curve"]["loss"][-1][1] for name in names}
    emo, sgd, *others = (last[name] for name in names)
    text = "; ".join(f"{name}: {number(value)}" for name, value in last.items())
    holds = emo < sgd < min(others)
    return Finding(entry.says, MIXED, "no numbers", text, _verdict(holds))


def _f4(entry: Entry, result: Mapping[str, Any]) -> Finding:
    cells = [cell for cell in result["cells"] if cell["world"] in FOUR]
    right, total = 0, 0
    for tested in (cell["world"] for cell in cells):
        column = {c["world"]: c["tests"][tested] for c in cells if tested in c["tests"]}
        if set(column) != set(FOUR):  # one was not run, or diverged
            continue
        sign = 1 if METRICS[column[tested]["metric"]].higher_is_better else -1
        best = max(column, key=lambda world: sign * column[world]["mean"]["value"])
        right, total = right + (best == tested), total + 1
    text = f"on {right} of {total} sets the learner trained there is the best"
    found = _verdict(right == total) if total == len(FOUR) else "undecided"
    return Finding(entry.says, "", "on 4 of 4", text, found)


def _f6(entry: Entry, result: Mapping[str, Any]) -> Finding:
    cells = _cells(result)

    def step(name: str) -> float:
        times = sorted(cells[name]["cost"]["inner_ms"][1:])
        return float(times[len(times) // 2])

    ratio = step("maml-emo-mixed") / step("maml")
    text = f"{ratio:.2f} times the step of SGD"
    return Finding(entry.says, MIXED, "1.5 times the step of SGD", text, _verdict(ratio <= 2))
