"""``python -m tests.attack.page``: put the recorded figures into docs/reliability.md."""

import json
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "reliability.md"
RECORD = HERE / "recorded.json"
HOUR = HERE / "hour.json"
FLIPS, KILLS = HERE / "flips.json", HERE / "kills.json"


def attacks(found: list[dict]) -> str:
    """Write the figures of several attacks as text and a table."""
    lines = [*map(_summary, found), ""]
    heads = ["kind", *(f"{_minutes(one)} minutes" for one in found), "slowest, s", "MB added"]
    lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for name in found[0]["kinds"]:
        known = [one["kinds"][name] for one in found if name in one["kinds"]]
        cells = [_ends(one["kinds"].get(name, {"ends": {}})) for one in found]
        slowest = max(about["slowest_seconds"] for about in known)
        most = max(about["most_megabytes"] for about in known)
        lines.append(f"| {name} | {' | '.join(cells)} | {slowest:.1f} | {most} |")
    return "\n".join(lines) + "\n"


def _minutes(found: dict) -> str:
    return f"{found['seconds'] / 60:.0f}"


def _summary(found: dict) -> str:
    count = len(found["failures"])
    return (
        f"- {_minutes(found)} minutes on a busy machine, which gave {found['processor_seconds']} seconds"
        f" of its processor. First seed {found['seed']}: {found['cases']} cases,"
        f" {count} failure{'' if count == 1 else 's'}."
    )


def _ends(about: dict) -> str:
    return ", ".join(f"{count} {end}" for end, count in about["ends"].items())


def flips(found: dict) -> str:
    """Write how flips were taken, file by file."""
    lines = [
        f"{found['flips']} flips over all kinds of files in turn, first seed {found['seed']}:",
        "",
        "| file | noticed | nothing changed | silent |",
        "|---|---:|---:|---:|",
    ]
    for name, ends in found["files"].items():
        counts = (ends.get(end, 0) for end in ("noticed", "same", "silent"))
        lines.append(f"| `{name}` | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def kills(found: dict) -> str:
    """Write what kills of the command itself left behind."""
    rows = (
        ("SIGKILLs", found["kills"]),
        ("saves that were reported before them", found["saves"]),
        ("of them lost", len(found["lost"])),
        ("published checkpoints that were torn", len(found["torn"])),
        ("kills inside a save", found["inside_a_save"]),
        ("kills inside a deletion", found["inside_a_deletion"]),
        ("kills before the first save of a session", found["before_the_first_save"]),
        ("sessions that did not start again by themselves", len(found["refused"])),
        ("runs of these kills that were finished", found["chains_finished"]),
        ("of them not equal, bit for bit, to the run that nobody killed", len(found["chains_that_differ"])),
    )  # fmt: skip
    lines = ["| what | number |", "|---|---:|", *(f"| {what} | {n} |" for what, n in rows)]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> dict:
    return json.loads(path.read_text())


def whole() -> str:
    """Return the page with all recorded figures."""
    parts: dict[str, Callable[[], str]] = {
        "attack": lambda: attacks([_read(path) for path in (RECORD, HOUR)]),
        "flips": lambda: flips(_read(FLIPS)),
        "kills": lambda: kills(_read(KILLS)),
    }
    page = PAGE.read_text()
    for name, made in parts.items():
        head, begin, rest = page.partition(f"<!-- {name}: begin -->\n")
        _, end, tail = rest.partition(f"<!-- {name}: end -->\n")
        if not begin or not end:
            raise ValueError(f"{PAGE.name} has no place for {name}")
        page = f"{head}{begin}{made()}{end}{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(whole())
