"""Records: which cases there are, measured one after another, with the environment they were found in."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torchemo.bench.peers import installed, missing
from torchemo.bench.plan import PLANS, Case
from torchemo.bench.process import in_fresh_process
from torchemo.runs.environment import environment

Record: TypeAlias = dict[str, Any]


def measure_all(
    what: str, *, quick: bool = False, on_case: Callable[[str], None] = lambda name: None
) -> Record:
    """Measure every case of a plan, each in a fresh process.

    Args:
        what: One of `torchemo.bench.plan.PLANS`.
        quick: Small cases and few repeats: shows that it works, not how fast it is.
        on_case: Told the name of each case before it is measured.
    """
    cases: dict[str, Any] = {}
    for name, case in PLANS[what](quick=quick).items():
        on_case(name)
        cases[name] = _measured(case)
    return {
        "what": f"torchemo bench {what}",
        "quick": quick,
        "environment": {**environment(), "load": _load()},
        "peers": {"installed": installed(), "left_out": missing()},
        "cases": cases,
    }


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record as JSON that people can read; numbers keep four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(record), indent=1) + "\n")


def _measured(case: Case) -> Record:
    found = in_fresh_process(case.measurement, case.request, keep=case.keep)
    return {"measurement": case.measurement, "request": case.request, **found}


def _load() -> float | None:
    """Say how busy the machine is: a record of a busy one is worth little."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
