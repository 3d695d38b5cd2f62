"""Write docs/speed.md and its figures from the records in benchmarks/results.

python benchmarks/page.py            write them
python benchmarks/page.py --check    say whether the page is that of the records
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from torchemo.lab.bench.tables import Table, ratio, seconds, tables

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, FIGURES = ROOT / "benchmarks/results", ROOT / "docs/speed.md", ROOT / "docs/figures"
RECORDS = ("step", "memory", "simulation", "data", "limit", "growth")
TUNED = "plain loop, channels last"
"""What we made of the plain loop to be a harder rival: the layout that its convolutions like best."""

INTRO = """# Speed

What one outer step costs here and elsewhere, what memory adds to it, and how close it is to what
the processor can do. Every number on this page comes from `benchmarks/results/*.json`; `make bench`
measures all of them again on an idle machine and writes this page. How the compiled block works:
[speed-notes.md](speed-notes.md).

- Work, unless a table says otherwise: 5-way 1-shot, 15 queries per class, 4 tasks, 5 inner steps.
  The network is a Conv-4 with 32 filters and batch statistics of the task at hand. All tensors are
  adapted, and the step takes the gradient of the mean query loss.
- Every case is a fresh process. Its variants take turns, and a speed is the ratio within a round:
  median and, in brackets, smallest and largest. Everybody's gradient is compared with the plain
  loop's in float64 first.
- All variants run with the same allocator setting: freed memory is kept in the process, as our
  commands do. One case repeats the comparison with the default. Peak memory is measured with the
  default.
- The plain loop also runs in another memory layout (channels last), which its users would have to
  know of. Where that is the fastest rival, the goals are also compared with the others in their
  usual layout.
- With two threads ours runs two tasks at once, the others have two threads inside operations.
- Whole steps differ by more than memory costs. The column "memory alone" therefore has the CPU time
  that memory adds to steps that are short without it, as a share of the step. These steps have
  16 px, or with a key network 84 px, one inner step and one query per class. The goals are compared
  with this column.
"""


SIMULATION = """Each table is one `torchemo bench memory --slots 1e6 --value 1kB --index ivfpq`: keys of
64 numbers around 1,000 centres, values in files, slots overwritten by FIFO and then by CLOCK, 1,000
recalls. No network runs. The machine was busy with other work: medians hold, 95th percentiles are
those of waiting. What it takes to run such a memory: [large-memory.md](large-memory.md).
"""


def read_records():
    """Read all records; a missing one is an error that names it."""
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in RECORDS}


def digest(records):
    """Return a digest of everything the page is made of."""
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()[:16]


def markdown(table: Table):
    """Write a table, with its title as a heading."""
    head = f"| {' | '.join(table.columns)} |\n|{'---|' * len(table.columns)}\n"
    return f"### {table.title}\n\n{head}" + "".join(
        f"| {' | '.join(row)} |\n" for row in table.rows
    )


def summary(record):
    """Sum up the cases against peers: one row each."""
    rows = []
    for name, case in record["cases"].items():
        if case["measurement"] != "step":
            continue
        ours, best = case["rows"]["torchemo, fused"], case["rows"][case["best_peer"]]
        reference = case["rows"].get("torchemo, reference")
        rows.append(
            [
                name,
                seconds(ours["wall"]),
                f"{case['best_peer']}, {seconds(best['wall'])}",
                ratio(ours["speed"]),
                "" if reference is None else ratio(reference["speed"]),
            ]
        )
    columns = ["step", "torchemo", "best of the others", "speed", "speed without compiled block"]
    return Table("Ours against the fastest of the others:", columns, rows)


def goals(records):
    """Say what was wanted and what was reached."""
    rows = [*_speed_goals(records["step"]), *_memory_goals(records["memory"])]
    growth = next(iter(records["growth"]["cases"].values()))
    steps = growth["request"]["steps"]
    flat, found = f"memory flat over {steps:,} outer steps", growth["growth"]
    rows.append([flat, "below 1 %", f"{found:.2%}", _met(found < 0.01)])
    return Table("What was wanted:", ["what", "wanted", "measured", "reached"], rows)


def _against_the_usual(rows):
    """Return the ratio of median times to the fastest of others that were not tuned by us."""
    others = [n for n in rows if not n.startswith("torchemo") and n != TUNED]
    walls = {name: rows[name]["wall"]["median"] for name in (*others, "torchemo, fused")}
    return min(walls[name] for name in others) / walls["torchemo, fused"]


def _speed_goals(record):
    wanted = {(2, 84, 1): 2.0, (2, 84, 2): 2.0, (2, 28, 2): 2.3, (1, 84, 1): 2.5, (1, 84, 2): 2.5}
    peak = {}
    for case in record["cases"].values():
        request = case["request"]
        if case["measurement"] == "peak" and request["workers"] == 2:
            peak[request["variant"]] = case["peak_mb"]
    for case in record["cases"].values():
        if case["measurement"] != "step" or case["allocator"] != "kept":
            continue
        work, workers = case["request"]["work"], case["request"]["workers"]
        key = (work["order"], work["size"], workers) if "order" in work else None
        if key in wanted:
            found = case["rows"]["torchemo, fused"]["speed"]["median"]
            name = f"MAML, order {key[0]}, {key[1]} px, {key[2]} thread(s)"
            yield [name, f"{wanted[key]} x", f"{found:.2f} x", _met(found >= wanted[key])]
            if case["best_peer"] == TUNED:
                found = _against_the_usual(case["rows"])
                name = f"{name}, others in their usual layout"
                yield [name, f"{wanted[key]} x", f"{found:.2f} x", _met(found >= wanted[key])]
    for case in record["cases"].values():
        if case["measurement"] == "family" and case["request"]["published"]:
            found = case["rows"]["arml"]["cost"]["median"]
            yield [
                "ARML's step, 84 px",
                "at most 2.5 x MAML's",
                f"{found:.2f} x",
                _met(found <= 2.5),
            ]
    others = [mb for name, mb in peak.items() if not name.startswith("torchemo")]
    if others:
        share = peak["torchemo, fused"] / min(others)
        yield ["peak memory, 2 workers", "at most 70 %", f"{share:.0%}", _met(share <= 0.7)]


def _memory_goals(record):
    limits = {
        "mean, first step": 3,
        "sum, first step": 3,
        "gated, first step": 3,
        "offsets": 3,
        "sum, key network, trained: outer": 10,
        "sum, key network, trained: self_recognition": 10,
        "sum, statistics network, trained: self_recognition": 10,
        "gate, first step": 20,
        "coordinate, first step": 20,
    }
    rows = record["cases"]["shares of the step"]["rows"]
    for name, limit in limits.items():
        found = 100 * rows[name]["alone"]["median"]
        yield [
            f"MAML with memory: {name}",
            f"below {limit} %",
            f"{found:.1f} %",
            _met(found < limit),
        ]
    for one in record["cases"]["search"]["recall"]:
        if one["index"] == "approximate" and one["slots"] == 10**6:
            found = 1e3 * one["seconds"]["median"]
            yield [
                "recall from 10^6 slots (approximate, keys in clusters)",
                "below 1 ms",
                f"{found:.2f} ms",
                _met(found < 1),
            ]


def _met(yes):
    return "yes" if yes else "no"


def draw_sizes(record):
    """Draw the step against inner steps, tasks, shots and filters."""
    cases = [c for c in record["cases"].values() if c["measurement"] == "sizes"]
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases)), cases, strict=True):
        for variant in case["points"][0]["rows"]:
            points = [(p["value"], p["rows"][variant]["wall"]) for p in case["points"]]
            _line(axes, points, variant)
        axes.set_xlabel(case["quantity"])
    figure.axes[0].set_ylabel("seconds")
    figure.axes[0].legend(fontsize=7)
    return figure


def draw_memory(record):
    """Draw recall and remember against slots, k and parameters."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    slots, k, size = figure.subplots(1, 3)
    found = record["cases"]["search"]
    for index, spread in dict.fromkeys((o["index"], o["spread"]) for o in found["recall"]):
        chosen = [o for o in found["recall"] if (o["index"], o["spread"]) == (index, spread)]
        points = [(o["slots"], o["seconds"]) for o in chosen]
        _line(slots, points, f"recall, {index}, {spread}")
    for controller in dict.fromkeys(o["controller"] for o in found["remember"]):
        chosen = [o for o in found["remember"] if o["controller"] == controller]
        _line(slots, [(o["slots"], o["seconds"]) for o in chosen], f"remember, {controller}")
    verbs = record["cases"]["verbs"]
    for axes, points in ((k, verbs["against_k"]), (size, verbs["against_parameters"])):
        for verb in ("recall", "combine", "remember"):
            _line(axes, [(p["value"], p[verb]) for p in points], verb)
    for axes, label in ((slots, "slots"), (k, "k"), (size, "remembered numbers")):
        axes.set_xlabel(label)
        axes.set_yscale("log")
        axes.legend(fontsize=6)
    slots.set_ylabel("seconds")
    return figure


def _line(axes, points, label):
    x = [value for value, _ in points]
    low, middle, high = ([s[end] for _, s in points] for end in ("min", "median", "max"))
    axes.plot(x, middle, marker="o", markersize=3, label=label)
    axes.fill_between(x, low, high, alpha=0.2)
    axes.set_xscale("log")
    axes.grid(alpha=0.3)


def page(records):
    """Write the whole page."""
    record = records["step"]
    environment = record["environment"]
    quick = any(found.get("quick") for found in records.values())
    lines = [INTRO]
    if quick:
        lines.append(
            "**These records are of a quick look: small cases that say little of speed.**\n"
        )
    cpu, packages = environment["cpu"], record["peers"]["installed"]
    peers = ", ".join(f"{name} {version}" for name, version in packages.items())
    left = ", ".join(f"{name}: {why}" for name, why in record["peers"]["left_out"].items())
    lines.append(
        f"Measured on {cpu['model']}, {cpu['usable']} cores, torch {environment['torch']['version']}"
        f" ({environment['torch']['capability']}), {environment['python']}; {peers}."
        f" Left out: {left or 'nobody'}. Load of the machine when it began: {environment['load']}.\n"
    )
    lines += ["## Summary\n", markdown(summary(record)), markdown(goals(records))]
    titles = {
        "step": "The step",
        "memory": "Memory",
        "simulation": "Large memories, simulated",
        "data": "Drawing tasks",
        "limit": "The limit",
        "growth": "Memory of the process over many steps",
    }
    figures = {"step": "speed-sizes.svg", "memory": "speed-memory.svg"}
    for name, title in titles.items():
        lines.append(f"## {title}\n")
        if name == "simulation":
            lines.append(SIMULATION)
        if name in figures:
            lines.append(f"![{title} against size](figures/{figures[name]})\n")
        lines += [markdown(table) for table in tables(records[name])]
    lines.append(f"Records: {digest(records)}\n")
    return "\n".join(lines)


def write(records):
    """Write page and figures."""
    PAGE.write_text(page(records))
    FIGURES.mkdir(exist_ok=True)
    style = {"svg.hashsalt": "torchemo", "font.size": 8, "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        for name, figure in (
            ("speed-sizes.svg", draw_sizes(records["step"])),
            ("speed-memory.svg", draw_memory(records["memory"])),
        ):
            about = {"Date": None, "Description": f"Records: {digest(records)}"}
            figure.savefig(FIGURES / name, metadata=about)


def check(records):
    """Name what does not belong to the records."""
    wrong = [] if PAGE.is_file() and PAGE.read_text() == page(records) else [PAGE.name]
    drawn = (FIGURES / "speed-sizes.svg", FIGURES / "speed-memory.svg")
    good = [path for path in drawn if path.is_file() and digest(records) in path.read_text()]
    return wrong + [path.name for path in drawn if path not in good]


def main():
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options, records = parser.parse_args(), read_records()
    if not options.check:
        write(records)
        return
    wrong = check(records)
    if wrong:
        sys.exit(f"not made of these records: {', '.join(wrong)}; run python benchmarks/page.py")


if __name__ == "__main__":
    main()
