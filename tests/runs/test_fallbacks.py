"""A system without the calls that only POSIX has: a run is trained, stopped, resumed and verified."""

import subprocess
import sys

from tests.apps.cli.conftest import POINTS

CODE = """
import sys
from pathlib import Path
import tests.runs.without_posix
from torchemo.apps.cli import main

def run(*words):
    try:
        main(words)
    except SystemExit as end:
        if end.code:
            raise

root, *training = sys.argv[1:]
run("train", "--out", root, *training)
log = Path(root) / "events.jsonl"
log.write_bytes(log.read_bytes().replace(b'"step": 2', b'"step": 7', 1))
run("train", "--resume", root)
run("checkpoint", "verify", root)
"""


def test_a_run_needs_nothing_that_only_posix_has(tmp_path):
    root = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(root), "--preset", "maml", *POINTS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (root / ".lock").exists()
    assert list(root.glob("damaged-*-events.jsonl"))
