"""Records: which cases there are, measured one after another, with the environment they were found in."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.core.errors import ConfigError
from torchemo.lab.bench.measures.peers import installed, missing
from torchemo.lab.bench.plan import PLANS, Case, place_plan, simulation_plan
from torchemo.lab.bench.process import in_fresh_process
from torchemo.lab.bench.sizes import Asked
from torchemo.runs.environment import environment

Record: TypeAlias = dict[str, Any]
SIMULATION = "torchemo bench memory --slots"


def measure_all(
    what: str,
    *,
    quick: bool = False,
    machine: Machine = CPU_ALONE,
    chosen: Sequence[str] = (),
    earlier: Record | None = None,
    on_case: Callable[[str], None] = lambda name: None,
) -> Record:
    """Measure the cases of a plan, each in a fresh process.

    Args:
        what: One of `torchemo.lab.bench.plan.PLANS`.
        quick: Small cases and few repeats: shows that it works, not how fast it is.
        machine: Where steps are measured, against the CPU in float32.
        chosen: Patterns of the cases to measure; empty for all.
        earlier: A record whose other cases are taken over.
        on_case: Called with the name of each case before it is measured.
    """
    plan = PLANS[what](quick=quick)
    if machine != CPU_ALONE:
        plan, what = place_plan(machine, quick=quick), f"{what} {_words(machine)}"
    wanted = _matching(plan, chosen, what=what)
    # Refused before anything is measured: a case may take minutes.
    old = _cases_of(earlier, what=what, quick=quick)
    cases: dict[str, Any] = {}
    for name, case in plan.items():
        if name in wanted:
            on_case(name)
            cases[name] = _measured(case)
        elif name in old:
            cases[name] = old[name]
    return {
        "what": f"torchemo bench {what}",
        "quick": quick,
        "environment": {**environment(), "load": _load()},
        "peers": {"installed": installed(), "left_out": missing()},
        "cases": cases,
    }


def _words(machine: Machine) -> str:
    return f"--device {machine.device} --precision {machine.precision}"


def simulate(
    wanted: Asked,
    *,
    earlier: Record | None = None,
    on_case: Callable[[str], None] = lambda name: None,
) -> Record:
    """Simulate one large memory; cases of an earlier record stay beside it, each with its environment."""
    old = {} if earlier is None else _simulations(earlier)
    cases = dict(old)
    for name, case in simulation_plan(wanted).items():
        on_case(name)
        where = {"environment": {**environment(), "load": _load()}}
        # The folder is a place on this machine.
        request = {n: v for n, v in case.request.items() if n != "folder"}
        cases[name] = {**_measured(case), "request": request, **where}
    return {
        "what": SIMULATION,
        "environment": environment(),
        "peers": {"left_out": {}},
        "cases": cases,
    }


def _simulations(record: Record) -> Record:
    if record.get("what") != SIMULATION:
        raise ConfigError(
            f"the record that is there is of {record.get('what')}, not of {SIMULATION}.",
            hint="Write to another file.",
        )
    found: Record = record["cases"]
    return found


def _matching(plan: Mapping[str, Case], chosen: Sequence[str], *, what: str) -> list[str]:
    """Return the names of the cases that match one of the patterns, or of all without patterns."""
    found = [n for n in plan if not chosen or any(fnmatchcase(n, p) for p in chosen)]
    if not found:
        raise ConfigError(
            f"bench {what} has no case like {', '.join(chosen)}.",
            hint=f"It has: {'; '.join(plan)}.",
        )
    return found


def read(path: Path) -> Record:
    """Read a record."""
    try:
        found: Record = json.loads(path.read_text())
        return {**found, "cases": dict(found["cases"]), "environment": dict(found["environment"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a record of torchemo bench: {error!r}.") from error


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record as JSON that people can read; numbers keep four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(record), indent=1) + "\n")


def _cases_of(record: Record | None, *, what: str, quick: bool) -> Record:
    if record is None:
        return {}
    here = environment()
    same = {"what": f"torchemo bench {what}", "quick": quick}
    known = {name: record.get(name) for name in same}
    for part in ("cpu", "packages"):
        same[part], known[part] = here.get(part), record["environment"].get(part)
    differing = [name for name in same if same[name] != known[name]]
    if differing:
        raise ConfigError(
            f"the record that is there differs in {', '.join(differing)}, so its cases cannot stay.",
            hint="Leave --cases out, or write to another file.",
        )
    found: Record = record["cases"]
    return found


def _measured(case: Case) -> Record:
    """Measure a case; of several processes the one with the median peak counts, and all are named."""
    runs = [
        in_fresh_process(case.measurement, case.request, keep=case.keep)
        for _ in range(case.processes)
    ]
    if len(runs) > 1:
        runs.sort(key=lambda run: run["peak_mb"])
        runs[0] = runs[len(runs) // 2] | {"peaks_mb": [run["peak_mb"] for run in runs]}
    return {"measurement": case.measurement, "request": case.request, **runs[0]}


def _load() -> float | None:
    """Say how busy the machine is: a record of a busy one is worth little."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
