"""``torchemo doctor``: is this machine fit for the work?"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from torchemo.report.terminal import print_json, print_table


@final
@dataclass(frozen=True)
class DoctorCommand:
    """Check python, torch, threads, disk, extras, and the gradients themselves."""

    folder: Path = Path()
    """Where runs are to be written."""
    json: bool = False
    """Print the diagnosis as JSON, with the whole environment."""

    def run(self) -> int:
        """Run the command; 1 if something is bad."""
        from torchemo.lab.doctor import diagnose

        found = diagnose(self.folder)
        if self.json:
            checks = [check._asdict() for check in found.checks]
            print_json({"ok": found.ok, "checks": checks, "environment": found.environment})
        else:
            rows = [[check.name, check.state, check.detail] for check in found.checks]
            print_table("torchemo doctor", ["what", "state", "detail"], rows)
            print("all is well" if found.ok else "something is wrong: see the rows marked bad")
        return 0 if found.ok else 1
