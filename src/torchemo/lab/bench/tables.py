"""From a record to tables: the command prints them, the speed page shows them."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Row = list[str]


class Table(NamedTuple):
    """A table of words."""

    title: str
    columns: Row
    rows: list[Row]


def tables(record: Mapping[str, Any]) -> list[Table]:
    """Turn every case of a record into a table; small cases of a kind share one."""
    found = list(_each(record["cases"]))
    peaks = {n: c for n, c in record["cases"].items() if c["measurement"] == "peak"}
    if peaks:
        found.append(_peaks(peaks))
    runs = {n: c for n, c in record["cases"].items() if c["measurement"] == "training"}
    if runs:
        found.append(_training(runs))
    places = {n: c for n, c in record["cases"].items() if c["measurement"] == "place"}
    if places:
        found.append(_places(places))
    return found


def seconds(spread: Mapping[str, float]) -> str:
    """Write a median with its range, in the unit that suits it.

    Example:
        >>> seconds({"median": 0.0123, "min": 0.011, "max": 0.0145})
        '12.3 ms (11.0 to 14.5)'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if spread["median"] * scale >= 1 or unit == "µs":
            break
    middle, low, high = (_three(scale * spread[end]) for end in ("median", "min", "max"))
    return f"{middle} {unit} ({low} to {high})"


def ratio(spread: Mapping[str, float]) -> str:
    """Write a ratio with its range."""
    return f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"


def percent(spread: Mapping[str, float]) -> str:
    """Write a share with its range."""
    low, high = (f"{100 * spread[end]:.1f}" for end in ("min", "max"))
    return f"{100 * spread['median']:.1f} % ({low} to {high})"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _each(cases: Mapping[str, Any]) -> Iterator[Table]:
    makers = {
        "step": _step,
        "learners": _learners,
        "family": _family,
        "sizes": _sizes,
        "shares": _shares,
        "verbs": _verbs,
        "search": _search,
        "mapped": _mapped,
        "simulation": _simulation,
        "data": _data,
        "sampling": _sampling,
        "packing": _packing,
        "mapped_images": _mapped_images,
        "limit": _limit,
        "resnet12": _resnet12,
        "growth": _growth,
    }
    for name, case in cases.items():
        if case["measurement"] in makers:
            yield makers[case["measurement"]](name, case)


def _step(name: str, case: Mapping[str, Any]) -> Table:
    columns = ["variant", "wall", "all cores", f"speed, {case['best_peer']} = 1"]
    rows = [
        [variant, seconds(row["wall"]), seconds(row["cpu"]), ratio(row["speed"])]
        for variant, row in case["rows"].items()
    ]
    return Table(name, columns, rows)


def _peaks(cases: Mapping[str, Any]) -> Table:
    rows = [
        [
            case["request"]["variant"],
            str(case["request"]["workers"]),
            f"{case['peak_mb']:.0f}",
            f"{case['peak_mb'] - case['before_mb']:.0f}",
        ]
        for case in cases.values()
    ]
    columns = ["variant", "threads", "peak, MB", "of it the step, MB"]
    return Table("peak resident memory of the step, a fresh process each", columns, rows)


def _training(cases: Mapping[str, Any]) -> Table:
    rows = [
        [name, path, seconds(row["seconds_per_1000_steps"]), ratio(row["speed"])]
        for name, case in cases.items()
        for path, row in case["rows"].items()
    ]
    return Table(
        "training end to end", ["run", "path", "1000 outer steps", "speed, reference = 1"], rows
    )


def _places(cases: Mapping[str, Any]) -> Table:
    rows = [
        [name, place, seconds(row["seconds_per_1000_steps"]), ratio(row["speed"])]
        for name, case in cases.items()
        for place, row in case["rows"].items()
    ]
    columns = ["run", "place", "1000 outer steps", "speed, CPU = 1"]
    return Table("outer steps, one thread of the host", columns, rows)


def _learners(name: str, case: Mapping[str, Any]) -> Table:
    rows = [
        [learner, variant, seconds(row["wall"]), f"{ratio(row['speed'])} of {found['base']}"]
        for learner, found in case["learners"].items()
        for variant, row in found["rows"].items()
    ]
    title = f"every learner, {case['request']['work']['size']} px, one thread"
    return Table(title, ["learner", "variant", "wall", "speed"], rows)


def _family(name: str, case: Mapping[str, Any]) -> Table:
    columns = [
        "method",
        "CPU time of a step",
        "MAML = 1",
        "parameters",
        "of the memory",
        "slots, kB",
    ]
    rows = [
        [
            method,
            seconds(row["cpu"]),
            ratio(row["cost"]),
            f"{row['parameters']:,}",
            f"{row['memory_parameters']:,}",
            f"{row['memory_bytes'] / 1e3:,.0f}",
        ]
        for method, row in case["rows"].items()
    ]
    return Table(f"{name}, training steps, one thread", columns, rows)


def _sizes(name: str, case: Mapping[str, Any]) -> Table:
    rows = [
        [str(point["value"]), variant, seconds(row["wall"]), ratio(row["speed"])]
        for point in case["points"]
        for variant, row in point["rows"].items()
    ]
    return Table(f"step {name}", [case["quantity"], "variant", "wall", "speed"], rows)


def _shares(name: str, case: Mapping[str, Any]) -> Table:
    rows = [
        [
            variant,
            seconds(row["wall"]),
            percent(row["added_share"]),
            percent(row["alone"]) if "alone" in row else "",
        ]
        for variant, row in case["rows"].items()
    ]
    title = f"MAML with memory, T = {case['capacity']}, k = {case['k']}"
    columns = ["memory", "wall", "added CPU time, whole steps", "memory alone, of the step"]
    return Table(title, columns, rows)


def _verbs(name: str, case: Mapping[str, Any]) -> Table:
    rows = [["encode", "key network", seconds(case["encode"])]]
    groups: list[tuple[str, Mapping[str, Any]]] = list(case["aggregators"].items())
    groups += [(f"sum, k = {one['value']}", one) for one in case["against_k"]]
    groups += [(f"sum, {one['value']:,} numbers", one) for one in case["against_parameters"]]
    for group, found in groups:
        rows += [[verb, group, seconds(found[verb])] for verb in ("recall", "combine", "remember")]
    return Table(f"the verbs alone, {case['tasks']} tasks", ["verb", "with", "wall"], rows)


def _search(name: str, case: Mapping[str, Any]) -> Table:
    rows = [
        [
            "recall",
            f"{one['index']}, {one['spread']}",
            f"{one['slots']:,}",
            seconds(one["seconds"]),
            f"{one['found']:.3f}",
        ]
        for one in case["recall"]
    ]
    rows += [
        ["remember", one["controller"], f"{one['slots']:,}", seconds(one["seconds"]), ""]
        for one in case["remember"]
    ]
    title = f"recall and remember one task, {case['key_dim']} dimensions, k = {case['k']}"
    return Table(title, ["verb", "with", "slots", "wall", "found of the exact"], rows)


def _mapped(name: str, case: Mapping[str, Any]) -> Table:
    request = case["request"]
    rows = [
        ["store", f"{request['slots']:,} slots of {4 * request['numbers']:,} bytes"],
        ["its size, MB", f"{case['store_mb']:,.0f}"],
        ["private memory it took, MB", f"{case['private_growth_mb']:.0f}"],
        ["write a slot, first tenth", seconds(case["write_early"])],
        ["write a slot, last tenth", seconds(case["write_late"])],
        ["read 20 slots", seconds(case["read_20_slots"])],
    ]
    return Table(name, ["what", "measured"], rows)


def _simulation(name: str, case: Mapping[str, Any]) -> Table:
    rows = [
        ["recall@20 against exact search, 100 queries", f"{case['recall_at_20']:.3f}"],
        *(
            [f"recall of a task and its 20 values, {kind}", _ends(case[kind]["recall"])]
            for kind in ("fifo", "clock")
        ),
        ["the same, values not in the system's cache", _ends(case["cold"])],
        ["search alone", _ends(case["search"])],
        *(
            [f"write of a task, {kind}", _ends(case[kind]["write_of_a_task"])]
            for kind in ("fifo", "clock")
        ),
        ["resident memory at the end and at most, MB", _two(case, "resident_mb", "peak_mb")],
        ["disk, MB", f"{case['disk_mb']:,.0f}"],
        ["filling it, s", f"{case['fill_seconds']:,.0f}"],
        ["keeping a version, s", f"{case['snapshot_seconds']:.2f}"],
    ]
    return Table(f"simulation: {name}", ["what", "median (95th percentile)"], rows)


def _ends(found: Mapping[str, float]) -> str:
    """Write a median and the 95th percentile.

    Example:
        >>> _ends({"median": 0.0123, "p95": 0.02})
        '12.3 ms (20.0)'
    """
    unit, scale = ("ms", 1e3) if found["median"] >= 1e-3 else ("µs", 1e6)
    return f"{_three(scale * found['median'])} {unit} ({_three(scale * found['p95'])})"


def _two(case: Mapping[str, Any], *names: str) -> str:
    return ", ".join(f"{case[name]:,.0f}" for name in names)


def _data(name: str, case: Mapping[str, Any]) -> Table:
    rows = [
        [
            row["source"],
            str(row["size"]),
            str(row["n_shot"]),
            f"{row['episodes_per_second']['median']:,.0f}",
            f"{row['open_seconds']:.2f}",
        ]
        for row in case["rows"]
    ]
    columns = ["source", "px", "shots", "episodes / s", "opened in, s"]
    return Table("tasks drawn in batches of four", columns, rows)


def _sampling(name: str, case: Mapping[str, Any]) -> Table:
    work = case["request"]["work"]
    rows = [
        ["drawing the tasks from a packed set", seconds(case["tasks"]), percent(case["share"])],
        ["the second-order step", seconds(case["step"]), ""],
    ]
    title = f"tasks of an outer step, {work['size']} px, one thread, processor time"
    return Table(title, ["what", "time", "share of the step"], rows)


def _packing(name: str, case: Mapping[str, Any]) -> Table:
    rate = {n: f"{found['median']:,.0f}" for n, found in case["per_second"].items()}
    rows = [
        ["data pack: decode, write, sync, verify", rate["pack"]],
        ["Pillow: decode and resize alone", rate["decode"]],
        ["disk alone: write, sync, read back for the checksum", rate["disk"]],
    ]
    asked = case["request"]
    title = (
        f"{case['images']:,} JPEG files of {asked['size']} px packed at {asked['packed']} px,"
        f" {case['threads']} decoding threads, wall time: {percent(case['share_of_both'])} of the speed of"
        f" decoder and disk, {percent(case['share_of_decoder'])} of the decoder's"
    )
    return Table(title, ["what", "images / s"], rows)


def _mapped_images(name: str, case: Mapping[str, Any]) -> Table:
    rows = [
        [f"{one['batch']:,}", f"{one['anonymous_mb']:.1f}", f"{one['mapped_mb']:.0f}"]
        for one in case["seen"]
    ]
    asked = case["request"]
    title = (
        f"a memory map of {asked['megabytes']:,} MB of which {asked['cache_mb']} MB may stay resident:"
        f" own memory {case['growth']:+.2%} after the first tenth"
    )
    return Table(title, ["batches of 4 tasks", "own, MB", "mapped, MB"], rows)


def _limit(name: str, case: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"{one['size']} px",
            str(one["workers"]),
            variant,
            f"{one['gflop']:.1f}",
            f"{one['gflops'][variant]['median']:.0f}",
            percent(one["share"][variant]),
        ]
        for one in case["cases"]
        for variant in one["share"]
    ]
    peaks = ", ".join(f"{p['median']:.0f} on {n}" for n, p in case["gflops_peak"].items())
    columns = ["step", "threads", "variant", "GFLOP", "GFLOP/s", "share of the peak"]
    return Table(f"matrix products reach {peaks} thread(s), GFLOP/s", columns, rows)


def _resnet12(name: str, case: Mapping[str, Any]) -> Table:
    row = [seconds(case["wall"]), f"{case['gflop']:.1f}", percent(case["share"])]
    title = f"ResNet-12, {case['request']['work']['size']} px, one task, one inner step, one thread"
    return Table(title, ["wall", "GFLOP", "share of the peak"], [row])


def _growth(name: str, case: Mapping[str, Any]) -> Table:
    rows = [[f"{one['step']:,}", f"{one['resident_mb']:.1f}"] for one in case["seen"]]
    title = f"resident memory, {name}: {case['growth']:+.2%} after the first tenth"
    return Table(title, ["outer step", "MB"], rows)
