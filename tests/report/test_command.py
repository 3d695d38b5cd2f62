"""``torchemo report``."""

import json
from pathlib import Path

import pytest
import tyro

from torchemo.apps.cli.report import ReportCommand
from torchemo.core.errors import ConfigError, DataError


def run(*arguments):
    return tyro.cli(ReportCommand, args=[str(a) for a in arguments]).run()


def test_one_folder_becomes_a_run_report_and_its_path_is_printed(points, capsys):
    assert run(points) == 0
    assert capsys.readouterr().out == f"{points / 'report.html'}\n"


def test_two_folders_become_a_comparison_where_it_is_asked_for(points, base, tmp_path, capsys):
    out = tmp_path / "both.html"
    assert run(base, points, "--comparison", "--out", out, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"reports": [str(out)]}
    assert "MAML + EMO against MAML" in out.read_text()
    assert run(base, base, "--comparison", "--against", points, points, "--out", out) == 0
    assert "over seeds and tasks" in out.read_text()


@pytest.mark.parametrize(
    "command",
    [
        ReportCommand(runs=()),
        ReportCommand(runs=(Path("a"),), comparison=True),
        ReportCommand(runs=(Path("a"),), against=(Path("b"),)),
    ],
)
def test_commands_that_make_no_sense_are_refused(command):
    with pytest.raises(ConfigError):
        command.run()


def test_runs_without_a_result_are_refused_with_the_command_that_makes_one(base, tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(DataError, match="torchemo eval"):
        run(base, tmp_path, "--comparison", "--out", tmp_path / "c.html")
