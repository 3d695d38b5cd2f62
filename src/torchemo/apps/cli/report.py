"""``torchemo report``: a run, or a comparison of runs, as one HTML file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, final

import tyro

from torchemo.core.errors import ConfigError
from torchemo.report.terminal import told


@final
@dataclass(frozen=True)
class ReportCommand:
    """Write a run as report.html in its folder, or a comparison of runs as one file; both work offline."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders; with --comparison the base first."""
    comparison: bool = False
    """Compare the runs on the tasks they were evaluated on instead of describing each."""
    against: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN ...")] = ()
    """With --comparison: runs of the other method, one per training seed, in the order of the base's."""
    protocol: Literal["standard", "paper"] = "standard"
    """With --comparison: which results."""
    split: Literal["test", "val"] = "test"
    """With --comparison: which results."""
    out: Path | None = None
    """With --comparison: the file to write; comparison.html by default."""
    json: bool = False
    """Print the paths as JSON."""

    def run(self) -> int:
        """Run the command."""
        self._check()
        written = [self._compare()] if self.comparison else self._describe()
        reports = [str(path) for path in written]
        return told(self.json, "\n".join(reports), reports=reports)

    def _check(self) -> None:
        if not self.runs:
            raise ConfigError("report needs a run folder.")
        if self.against and not self.comparison:
            raise ConfigError("--against belongs to --comparison.")
        if self.out is not None and not self.comparison:
            raise ConfigError(
                "--out belongs to --comparison.",
                hint="The report of a run is report.html in its folder.",
            )
        if self.comparison and len(self.runs) + len(self.against) < 2:
            raise ConfigError("report --comparison needs two runs or more, the base first.")

    def _describe(self) -> list[Path]:
        from torchemo.report.run.page import write_run_report

        return [write_run_report(root) for root in self.runs]

    def _compare(self) -> Path:
        from torchemo.report.comparison import write_comparison_report
        from torchemo.report.run.collect import compare_runs

        pairs = [(self.runs[:1], self.runs[i : i + 1]) for i in range(1, len(self.runs))]
        if self.against:
            pairs = [(self.runs, self.against)]
        found = [
            compare_runs(base, other, split=self.split, protocol=self.protocol)
            for base, other in pairs
        ]
        return write_comparison_report(found, self.out or Path("comparison.html"))
