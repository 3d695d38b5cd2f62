"""``torchemo study``: lists, shows, keeps records, and is kind about mistakes."""

import json
from pathlib import Path

import pytest

from tests.lab.study.test_result import a_result, scores
from torchemo.lab.study.catalogue import ENTRIES
from torchemo.lab.study.pages.reproducibility import COLUMNS, reproducibility
from torchemo.lab.study.records import path_of, read_result
from torchemo.lab.study.result import save_scores, write_json

ROOT = Path(__file__).parents[3]
VERDICT = COLUMNS.index("verdict")


def test_the_list_names_every_entry_with_its_minutes(torchemo):
    found = torchemo("study", "list", "--json")
    assert found.code == 0
    assert [one["name"] for one in found.json] == list(ENTRIES)
    assert all(one["minutes"] for one in found.json)
    shown = torchemo("study", "list")
    assert all(name in shown.out for name in ENTRIES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "T11"), "Did you mean 'T1'"),
        (("show", "Q"), "There are: T1"),
        (("run",), "study run needs a name"),
        (("record",), "study record needs a name"),
        (("restore",), "study restore needs a name"),
        (
            ("run", "T9", "--scale", "cpu", "--tasks", "regression"),
            "T9 cannot be run at scale 'cpu'",
        ),
        (("run", "T1", "--jobs", "0"), "--jobs should be 1 or more"),
        (("run", "T1", "--cells", "nobody"), "no cell like nobody"),
        (("run", "T1", "--options", "train.step=3"), "Did you mean 'train.steps'"),
        (("run", "T1", "--options", "memory.slots=3"), "unknown option 'memory.slots'"),
    ],
)
def test_a_mistake_is_told_before_anything_is_run(torchemo, words, said, tmp_path):
    found = torchemo("study", *words, *(("--out", tmp_path) if words[0] == "run" else ()))
    assert found.code == 2
    assert said in found.err
    assert not list(tmp_path.iterdir())


def test_a_study_without_its_data_says_what_to_pass(torchemo, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHEMO_DATA", raising=False)
    found = torchemo("study", "run", "T2", "--scale", "cpu", "--out", tmp_path / "out")
    assert found.code == 3
    assert "needs the image set 'birds84'" in found.err
    assert "--data" in found.err
    (tmp_path / "empty").mkdir()
    found = torchemo("study", "run", "T2", "--data", tmp_path / "empty", "--out", tmp_path / "out")
    assert "has no image set 'birds84'" in found.err


def test_showing_what_was_never_run_says_how_to_run_it(torchemo, tmp_path):
    found = torchemo("study", "show", "T1", "--out", tmp_path)
    assert found.code == 3
    assert "torchemo study run T1" in found.err


def a_contrast(name, cell, against, *, low, high, claims=("C1",), **changes):
    interval = {"value": (low + high) / 2, "low": low, "high": high, "n": 9, "method": "t"}
    return {
        **{"name": name, "cell": cell, "against": against, "test": None, "expect": "better"},
        **{"claims": list(claims), "paper": 2.0, "diverged": [], "metric": "accuracy"},
        **{"over_tasks": interval, "over_seeds": {"both": interval}},
        **{"per_domain": {}, "relative": 0.1},
        **changes,
    }


def write_record(folder, contrasts, **changes):
    cells = [
        {
            **{"name": f"{learner}{kind}", "preset": f"{learner}{kind}"},
            **{"role": "memory" if kind else "base", "tests": {}, "world": "mixed", "runs": []},
            "variant": "mixed" if kind == "-emo-mixed" else None,
        }
        for learner in ("maml", "anil", "meta-sgd")
        for kind in ("", "-offsets", "-emo-mixed")
    ]
    worlds = {"mixed": ["regression:hsml4"]}
    result = a_result(cells=cells, contrasts=contrasts, worlds=worlds, **changes)
    write_json(folder / f"{result['entry']}-{result['scale']}-{result['tasks']}.json", result)


def rows(text):
    """Rows of the page under the heading of each claim, table and figure; a verdict alone is a row of one."""
    found = {}
    for part in text.split("\n### ")[1:]:
        name, _, lines = part.partition("\n")
        tables = [x for x in lines.splitlines() if x.startswith("| ")][2:] or lines.splitlines()[
            3:4
        ]
        found[name] = [[cell.strip("* |") for cell in row.split(" | ")] for row in tables]
    return found


def test_without_records_everything_is_not_run(tmp_path):
    found = rows(reproducibility(tmp_path))
    verdicts = {name: row[0][-1] for name, row in found.items()}
    of_paper = {name for name, entry in ENTRIES.items() if entry.in_paper}
    assert set(verdicts) == {f"C{i}" for i in range(1, 8)} | of_paper
    assert set(verdicts.values()) == {"not run"}


def gains(kind, low=0.01, high=0.03, **changes):
    """All that C1 rests on, in one variant."""
    return [
        a_contrast(f"{n}{kind} vs {n}", f"{n}{kind}", n, low=low, high=high, **changes)
        for n in ("maml", "anil", "meta-sgd")
    ]


def test_a_claim_holds_in_a_variant_if_all_its_contrasts_hold(tmp_path):
    write_record(tmp_path, [*gains("-emo-mixed", low=-0.02, high=0.01), *gains("-offsets")])
    found = rows(reproducibility(tmp_path))["C1"]
    assert [row[0] for row in found] == ["mixed", "offsets"]
    assert [row[VERDICT] for row in found] == ["does not hold", "holds"]
    assert "+2.00 [+1.00, +3.00] points" in found[1][2]
    assert "T1-cpu-regression.json" in found[1][4]
    page = reproducibility(tmp_path).partition("## Records")[2]
    assert "| regression:hsml4 (the paper has no regression), cpu | 0 |" in page


def test_a_study_at_the_smallest_scale_is_no_evidence(tmp_path):
    write_record(tmp_path, [a_contrast("x", "maml-offsets", "maml", low=1, high=2)], scale="smoke")
    assert rows(reproducibility(tmp_path))["C1"] == [["not run"]]


def test_the_benefit_table_must_hold_on_every_domain(tmp_path):
    domains = {
        "birds": {"value": 0.02, "low": 0.01, "high": 0.03},
        "fungi": {"value": 0.0, "low": -0.01, "high": 0.01},
    }
    write_record(tmp_path, gains("-offsets", per_domain=domains))
    found = rows(reproducibility(tmp_path))
    assert found["C1"][0][VERDICT] == "holds"
    assert found["T1"][0][VERDICT] == "does not hold"


def test_the_committed_pages_are_what_the_command_writes(torchemo, tmp_path):
    page, pages = tmp_path / "R.md", [tmp_path / "findings.md", tmp_path / "results.md"]
    for copy in pages:
        copy.write_text((ROOT / "docs" / copy.name).read_text())
    found = torchemo(
        *("study", "reproducibility", "--records", ROOT / "studies"),
        *("--out", page, "--pages", *pages),
    )
    assert found.code == 0
    assert page.read_text() == (ROOT / "docs" / "reproducibility.md").read_text(), (
        "run: make reproducibility"
    )
    for copy in pages:
        kept = (ROOT / "docs" / copy.name).read_text()
        assert copy.read_text() == kept, "run: make reproducibility"


def test_a_folder_of_records_that_is_not_there_leaves_the_page_as_it_was(torchemo, tmp_path):
    page = tmp_path / "R.md"
    page.write_text("kept")
    found = torchemo("study", "reproducibility", "--records", tmp_path / "nosuch", "--out", page)
    assert found.code == 3
    assert "nosuch is not a folder of recorded studies" in found.err
    assert page.read_text() == "kept"


def test_committed_records_are_small_and_belong_to_entries_that_exist():
    for path in (ROOT / "studies").glob("*.json"):
        assert path.stat().st_size < 1_000_000
        assert json.loads(path.read_text())["entry"] in ENTRIES


def test_a_result_is_recorded_by_name(torchemo, tmp_path):
    folder = tmp_path / "out" / "T1-cpu-regression"
    write_json(folder / "result.json", a_result())
    save_scores(folder / "scores.npz", {"a|mixed": scores([[[0.5], [0.25]]])})
    words = ("--tasks", "regression", "--out", tmp_path / "out", "--to", tmp_path / "kept")
    found = torchemo("study", "record", "T1", *words, "--json")
    assert found.code == 0, found.err
    assert [Path(p).name for p in found.json["records"]] == [
        "T1-cpu-regression.json",
        "T1-cpu-regression.npz",
    ]


@pytest.mark.filterwarnings("default:tasks are called images")
def test_images_may_be_asked_for_by_their_earlier_name(torchemo, tmp_path):
    words = ("study", "run", "R3", "--scale", "paper", "--out", tmp_path, "--tasks")
    earlier, now = torchemo(*words, "pictures"), torchemo(*words, "images")
    assert earlier.err == f"torchemo: note: tasks are called images now, not pictures.\n{now.err}"
    said = " ".join(torchemo(*words, "pics").err.replace("│", " ").split())
    assert "invalid choice: 'pics' (choose from images, features, regression)" in said


def test_a_record_of_images_is_found_by_its_earlier_name(tmp_path):
    command = "torchemo study run T1 --tasks pictures"
    earlier = tmp_path / "T1-cpu-pictures.json"
    write_json(earlier, a_result(tasks="pictures", command=command))
    assert path_of(tmp_path, "T1", "cpu", "images", ".json") == earlier
    found = read_result(earlier)
    assert (found["tasks"], found["command"]) == ("images", "torchemo study run T1 --tasks images")
    (tmp_path / "T1-cpu-images.json").touch()
    assert path_of(tmp_path, "T1", "cpu", "images", ".json").name == "T1-cpu-images.json"
