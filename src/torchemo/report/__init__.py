"""Reports: one self-contained HTML file per run and per comparison; nothing is fetched, no script runs."""

from torchemo.report.comparison_page import write_comparison_report
from torchemo.report.run_page import write_run_report

__all__ = ["write_comparison_report", "write_run_report"]
