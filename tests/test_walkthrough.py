"""The walkthrough: its commands exist, and its numbers are the recorded ones."""

import json
import re
import shlex
from pathlib import Path

import pytest

from torchemo.apps.cli import _parse
from torchemo.apps.cli.train import TrainCommand
from torchemo.core.errors import ConfigError

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "walkthrough.md").read_text()
RECORD = json.loads((ROOT / "benchmarks" / "results" / "walkthrough.json").read_text())
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"(?m)^\$ (torchemo .+)$", TEXT)]
WRONG = ("maml-emu", "train.step=300")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_is_typed_is_understood(words):
    command = _parse(words)
    if not isinstance(command, TrainCommand) or command.resume is not None:
        return
    if any(wrong in words for wrong in WRONG):
        with pytest.raises(ConfigError, match="unknown"):
            command.resolved()
    else:
        assert command.resolved().data.source == command.data


def test_every_comparison_shows_what_was_recorded():
    shown = re.findall(
        r"│ all    │ (\S+) \[(\S+), (\S+)\] │ (\S+) │\n.*\n"
        r"MAML (\S+), MAML \+ offsets (\S+); (\d+) tasks",
        TEXT,
    )
    recorded = []
    for name in ("birds", "textures", "omniglot"):
        found = RECORD["comparisons"][name]
        whole = found["difference"]
        ends = [f"{100 * whole['difference'][end]:+.2f}" for end in ("value", "low", "high")]
        means = [f"{100 * found[side]['mean']:.2f}" for side in ("base", "other")]
        recorded.append((*ends, f"{whole['p_value']:.4f}", *means, str(found["tasks"])))
    assert shown == recorded
