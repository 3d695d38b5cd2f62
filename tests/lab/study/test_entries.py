"""Every table and figure of the paper, run by the command at the smallest scale."""

import pytest

from torchemo.lab.study.catalogue import ENTRIES

pytestmark = pytest.mark.study

IMAGES = (
    *("T2", "T6", "T9", "F4", "F6"),
    *("R2", "R3", "R5", "R6", "R7"),
    *("L2", "L3", "L5", "L7", "L8", "L9"),
)
"""Entries that are run on images; the others, quicker, on regression."""


SMOKE = [n for n, one in ENTRIES.items() if any(s.startswith("smoke/") for s in one.scales)]
"""Entries that can be run without data; those on features of a pretrained network cannot."""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all entries: they share the runs they have in common."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("name", SMOKE)
def test_the_entry_runs_from_end_to_end(torchemo, out, name):
    tasks = "images" if name in IMAGES else "regression"
    words = ["--scale", "smoke", "--tasks", tasks, "--out", out, "--jobs", 1, "--seeds", 0]
    few = (
        ["--no-controls"]
        if name in ("T3", "T4", "T7", "T8", "T9", "F3", "F5", "F7", "R1", "R3", "R4", "R5", "R7")
        else []
    )
    found = torchemo("study", "run", name, *words, *few, "--json")
    assert found.code == 0, found.err
    result = found.json[0]
    assert result["entry"] == name
    assert not result["failed"]
    cells = {cell["name"]: cell for cell in result["cells"]}
    scored = [cell for cell in cells.values() if cell["tests"] or cell["cost"]]
    reported = {name for contrast in result["contrasts"] for name in contrast["diverged"]}
    diverged = [
        cell
        for cell in cells.values()
        if not cell["tests"]
        and (cell["name"] in reported or any(run["ended"] == "diverged" for run in cell["runs"]))
    ]
    assert len(scored) + len(diverged) >= len(cells)
    folder = out / f"{name}-smoke-{tasks}"
    assert ENTRIES[name].title in (folder / "table.md").read_text()
    assert "<svg" in (folder / "report.html").read_text()
    shown = torchemo("study", "show", name, "--out", out)
    assert shown.code == 0
    assert "The paper" in shown.out or name == "F1" or not ENTRIES[name].in_paper


def test_ways_out_of_random_labels_run_on_images(torchemo, tmp_path):
    cells = ("maml", "gates", "aligned", "proto-maml", "proto-maml gates")
    words = ("--scale", "smoke", "--out", tmp_path, "--jobs", 1, "--seeds", 0, "--no-controls")
    found = torchemo("study", "run", "R1", *words, "--cells", *cells, "--json")
    assert found.code == 0, found.err
    drawn = {c["name"]: c for c in found.json[0]["contrasts"]}
    for name in ("aligned vs gates", "proto-maml gates vs proto-maml", "proto-maml vs maml"):
        assert drawn[name]["tasks"] == 12


def test_the_benefit_table_runs_with_all_its_controls_on_images(torchemo, tmp_path):
    words = ("--scale", "smoke", "--out", tmp_path, "--jobs", 1, "--seeds", 0)
    found = torchemo("study", "run", "T1", *words, "--cells", "maml*", "--json")
    assert found.code == 0, found.err
    cells = {cell["name"]: cell for cell in found.json[0]["cells"]}
    assert (
        len(cells) == 6 + 3 + 3 + 3 + 4
    )  # with controls of three memories of gradients, and of offsets
    accuracy = cells["maml-offsets"]["tests"]["mixed"]["per_step"][0]
    assert 0.2 <= accuracy <= 0.8  # two classes, labels at random, before the first step
    for name in ("maml", "maml-offsets", "maml-offsets/no-memory", "maml-offsets/one-slot"):
        assert set(cells[name]["tests"]) == {"mixed", "seen classes"}
        mixed, seen = (cells[name]["tests"][test] for test in ("mixed", "seen classes"))
        assert (len(mixed["per_step"]), len(seen["per_step"])) == (3, 1)
        assert mixed["per_domain"] != seen["per_domain"]  # the tasks are others
    assert set(cells["maml"]["tests"]["mixed"]["per_domain"]) <= {
        f"synthetic-{kind}" for kind in ("birds", "textures", "aircraft", "fungi")
    }
