"""What memory changes for each learner of a study: a figure per set of tasks."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from torchemo.lab.study.own.limits import IN_ONE_STEP
from torchemo.lab.study.pages.drawings import Pair, with_and_without
from torchemo.lab.study.scales import OWN_WORLDS
from torchemo.report.format import METRICS

FEWEST = 3
"""For fewer learners than these a table is clearer."""


def memory_figures(result: Mapping[str, Any]) -> dict[str, tuple[str, Markup]]:
    """Return by task set the caption and the figure of learners that a study has without and with memory."""
    found = {}
    for world in dict.fromkeys(cell["world"] for cell in result["cells"]):
        pairs = _pairs(result, world)
        if len(pairs) < FEWEST:
            continue
        metric = next(
            METRICS[c["tests"][world]["metric"]] for c in result["cells"] if world in c["tests"]
        )
        scaled = [
            Pair(label, *([metric.scale * v for v in scores] for scores in of_seeds))
            for label, *of_seeds in pairs
        ]
        where = f" on {OWN_WORLDS[world]}" if world in OWN_WORLDS else ""
        figure = with_and_without(
            scaled,
            name=f"memory-{world}",
            x=metric.unit,
            higher_is_better=metric.higher_is_better,
        )
        found[world] = (f"Learners without and with memory{where}; small dots are seeds.", figure)
    return found


def _pairs(result: Mapping[str, Any], world: str) -> list[Pair]:
    """Return seeds' scores of cells with the same name but for the memory, the best without memory last.

    Cells that train another cell's method once more, longer or in equal time, are left to the tables.
    """
    scored = {
        cell["name"]: (cell, cell["tests"][world]["seed_means"])
        for cell in result["cells"]
        if cell["world"] == world and world in cell["tests"]
    }
    found = []
    for name, (cell, without) in scored.items():
        preset = cell["preset"]
        _, given = scored.get(name.replace(preset, f"{preset}-offsets", 1), (None, None))
        again = cell["of"] is not None and name.startswith(f"{cell['of']} ")
        if cell["role"] == "base" and given is not None and not again:
            title = cell["title"].removesuffix(f", {OWN_WORLDS.get(world, world)}")
            _, whole = scored.get(name.removesuffix(IN_ONE_STEP), (None, ()))
            whole = whole if name.endswith(IN_ONE_STEP) else ()
            found.append(Pair(title, without, given, whole))
    return sorted(found, key=lambda pair: -sum(pair.without))
