"""The model card of a run: what it is, what it was trained on, and how well it did."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchemo.config.run import RunConfig
from torchemo.core.errors import DataError
from torchemo.data.source import embedded
from torchemo.models import is_pretrained
from torchemo.runs.compare import read_result
from torchemo.runs.events import read as read_events
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import Trained
from torchemo.runs.score import task_size

PAPER = "EMO: Episodic Memory Optimization for Few-Shot Meta-Learning (Du et al., CoLLAs 2023)"
LARGEST_LIST = 60
"""Names of classes that a card lists; of more it says the number alone."""


def results_of(run: Path) -> list[dict[str, Any]]:
    """Read the test results of a run; damaged ones are left out."""
    found = []
    for path in sorted(run.glob("eval-*.json"), key=lambda path: (len(path.name), path.name)):
        try:
            found.append(read_result(path))
        except DataError:
            continue
    return found


def card(run: Path, trained: Trained, results: list[dict[str, Any]]) -> str:
    """Write the card of a run, without the front matter that a hub reads."""
    parts = (
        [f"# {trained.system.title}, trained with torchemo"],
        _about(trained),
        _use(),
        _data(run, trained.config),
        _results(results),
        _rights(trained.config),
    )
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _about(trained: Trained) -> Iterator[str]:
    system, shape, config = trained.system, trained.shape, trained.config
    numbers = sum(p.numel() for p in system.params.values())
    yield (
        f"A few-shot learner: give it a few examples per class, and it sorts others. {system.title} was"
        f" meta-trained for {system.iteration:,} outer steps on {shape.n_out}-way {shape.n_shot}-shot tasks"
        f" (seed {config.train.seed}). Network: {config.model.name}, {numbers:,} learned numbers."
    )
    if system.memory is not None:
        store = system.memory.store
        yield f"Memory: {system.memory.title}, {len(store)} of {store.capacity} slots filled."


def _use() -> Iterator[str]:
    yield "## Use"
    yield ""
    yield "```python"
    yield "from torchemo.runs.sharing.hub import SharedRun"
    yield ""
    yield 'run = SharedRun.from_pretrained("this folder or repository").run'
    yield 'answers = run.adapt("mine/support").predict("mine/query")  # support: one folder per class'
    yield "```"


def _data(run: Path, config: RunConfig) -> Iterator[str]:
    names = ", ".join(Path(source).name for source in config.data.source)
    yield "## Trained on"
    yield ""
    yield f"{names}. No image of them is in these files."
    classes = _classes(run)
    if classes:
        yield ""
        yield "| split | classes | names |"
        yield "|---|---:|---|"
        for split, own in classes.items():
            shown = ", ".join(own) if len(own) <= LARGEST_LIST else "not listed"
            yield f"| {split} | {len(own)} | {shown.replace('|', '/')} |"


def _classes(run: Path) -> Mapping[str, list[str]]:
    """Return the classes of each split, as a run noted them when it started."""
    try:
        started = [e for e in read_events(RunFolder(run).events) if e["event"] == "start"]
    except (DataError, OSError):
        return {}
    found: Mapping[str, list[str]] = started[0].get("classes", {}) if started else {}
    return found


def _results(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "## Test results"
    yield ""
    if not results:
        yield "It was not evaluated when this card was made."
        return
    yield "Means over tasks with 95 % intervals. inductive: every query is answered by itself."
    yield ""
    yield "| tasks | data | statistics | metric | mean | number of tasks |"
    yield "|---|---|---|---|---|---:|"
    yield from (_row(result) for result in results)


def _row(result: dict[str, Any]) -> str:
    protocol, last = result["protocol"], result["summary"]["last"]
    size = task_size(protocol.get("way"), protocol.get("shot")).replace("-", " ")
    what = f"{protocol['split']}, {protocol['name']}{size}"
    data = result.get("on") or ", ".join(result["domains"])
    interval = f"{last['value']:.4f} [{last['low']:.4f}, {last['high']:.4f}]"
    cells = [what, data, protocol["statistics"], result["metric"], interval, str(last["n"])]
    return f"| {' | '.join(cells)} |"


def _rights(config: RunConfig) -> Iterator[str]:
    yield "## Rights"
    yield ""
    yield "- The code, torchemo, has the MIT license. It does not cover these weights."
    if embedded(config.data.source):
        yield "- The data were made by formulas; nobody else has rights in them."
    else:
        yield (
            "- These weights were learned from the data above. Whoever shares them decides on a license that"
            " the data allow, and names it here."
        )
    if is_pretrained(config.model.name):
        yield (
            f"- Images go through {config.model.name} first. Its weights are not in these files; they have a"
            " license of their own (EfficientNet-Lite0: Apache-2.0)."
        )
    yield f"- The paper behind torchemo: {PAPER}."


def summary(trained: Trained, results: list[dict[str, Any]]) -> str:
    """Return what a hub shows of a run, as JSON."""
    shape = trained.shape
    about = {
        "library": "torchemo",
        "method": trained.system.title,
        "model": trained.config.model.name,
        "tasks": {"kind": shape.kind, "x": list(shape.x), "way": shape.n_out, "shot": shape.n_shot},
        "outer_steps": trained.system.iteration,
        "results": [{**r["protocol"], **r["summary"]["last"]} for r in results],
    }
    return json.dumps(about, indent=1) + "\n"
