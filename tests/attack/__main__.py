"""``python -m tests.attack``: attack for a time, print what fails with its seed, and record the figures."""

import argparse
import sys
from pathlib import Path

from tests.attack import kinds_data, kinds_files, kinds_runs  # noqa: F401 -- they register themselves
from tests.attack.harness import KINDS, attack, save


def main() -> int:
    """Run the command; 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first case of every kind")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only this kind")
    parser.add_argument("--cases", type=int, help="of every kind, at most")
    parser.add_argument("--out", type=Path, help="file for the figures")
    asked = parser.parse_args()
    found = attack(
        asked.kind or sorted(KINDS), seconds=asked.seconds, seed=asked.seed, most=asked.cases
    )
    for name, about in found["kinds"].items():
        print(f"{name}: {about['cases']} cases, {about['ends']}")
    print(f"{found['cases']} cases, {len(found['failures'])} failures")
    if asked.out is not None:
        save(found, asked.out)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
