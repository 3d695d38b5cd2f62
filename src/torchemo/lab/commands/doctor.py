"""``torchemo doctor``: is this machine fit for the work?"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.report.terminal import print_json, print_table, say


@final
@dataclass(frozen=True)
class DoctorCommand:
    """Check python, torch, threads, disk, extras, and the gradients themselves."""

    folder: Path = Path()
    """Where runs are to be written."""
    machine: Machine = CPU_ALONE
    """Where to compute. Another device than the CPU is compared with the CPU, and one file is written."""
    out: Path = Path("doctor.json")
    """With a device: the file of everything that was found, to be sent to others."""
    json: bool = False
    """Print the diagnosis as JSON, with the whole environment."""

    def run(self) -> int:
        """Run the command; 1 if something is bad."""
        if self.machine != CPU_ALONE:
            return self._device()
        from torchemo.lab.doctor import diagnose

        found = diagnose(self.folder)
        if self.json:
            checks = [check._asdict() for check in found.checks]
            print_json({"ok": found.ok, "checks": checks, "environment": found.environment})
        else:
            rows = [[check.name, check.state, check.detail] for check in found.checks]
            print_table("torchemo doctor", ["what", "state", "detail"], rows)
            say("all is well" if found.ok else "something is wrong: see the rows marked bad")
        return 0 if found.ok else 1

    def _device(self) -> int:
        from torchemo.lab.doctor_device import device_report
        from torchemo.runs.storage.durable import replace_file
        from torchemo.training.device import place_of, task_workers

        task_workers()
        found = device_report(place_of(self.machine))
        replace_file(self.out, (json.dumps(found, indent=2) + "\n").encode())
        if self.json:
            print_json(found)
        else:
            print_table(
                f"torchemo doctor on {found['place']}", ["what", "state", "detail"], _rows(found)
            )
            say(f"written: {self.out}")
        return 0 if found["ok"] else 1


def _rows(found: dict[str, Any]) -> list[list[str]]:
    equality, memory = found["equality"], found["memory"]
    detail = (
        f"{equality['precision']}: largest relative difference"
        f" {equality['largest_relative_difference']:.1e}, at most {equality['at_most']:.0e}"
    )
    rows = [["meta-gradient = the CPU's", "ok" if equality["ok"] else "bad", detail]]
    rows += [
        [f"three steps of {one['preset']}", "ok" if one["ok"] else "bad", one["detail"]]
        for one in found["presets"]
    ]
    speed = ", ".join(f"{name} {s:.3f} s" for name, s in found["seconds_per_step"].items())
    rows.append(["one step of maml", "note", speed])
    rows.append(["memory", "note", f"{memory['peak_bytes']:,} of {memory['bytes'] or 0:,} bytes"])
    return rows
