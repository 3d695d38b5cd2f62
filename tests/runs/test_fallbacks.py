"""A system without the calls that only POSIX has: a run is trained, stopped, resumed and verified."""

import subprocess
import sys

from tests.apps.cli.conftest import POINTS

CODE = """
import sys
import tests.runs.without_posix
from torchemo.apps.cli import main
main(sys.argv[1:])
"""


def without_posix(*words):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_needs_nothing_that_only_posix_has(tmp_path):
    root = tmp_path / "run"
    done = without_posix("train", "--out", root, "--preset", "maml", *POINTS)
    assert done.returncode == 0, done.stderr
    log = root / "events.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"step": 2', b'"step": 7', 1))
    for words in (("train", "--resume", root), ("checkpoint", "verify", root)):
        done = without_posix(*words)
        assert done.returncode == 0, done.stderr
    assert not (root / ".lock").exists()
    assert list(root.glob("damaged-*-events.jsonl"))
