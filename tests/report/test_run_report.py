"""Reports of runs: whole, escaped, self-contained, and honest about what is missing."""

import hashlib
import json
import re
import shutil
from dataclasses import replace

import pytest

from tests.report.conftest import (
    HOSTILE_CLASS,
    HOSTILE_DOMAIN,
    PICTURES,
    POINTS,
    SMALL_KEY,
    make_run,
)
from tests.report.html import Page, broken_laws
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.report.run.page import write_run_report
from torchemo.runs.score import Protocol
from torchemo.runs.storage.seal import with_digest
from torchemo.runs.train import train_run


def read(root):
    return (root / "report.html").read_text()


def digests_of_files(root):
    return {
        path.relative_to(root): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and path.name != "report.html"
    }


@pytest.mark.parametrize("run", ["points", "pictures", "hostile"])
def test_a_report_is_one_small_accessible_file_that_refers_to_nothing_else(run, request):
    text = read(request.getfixturevalue(run))
    assert broken_laws(text) == []
    assert "://" not in text


@pytest.mark.parametrize(
    "bad",
    [
        "<script>1</script>",
        '<img src="https://x/y.png" alt="x">',
        '<p onclick="x">a</p>',
        "<svg></svg>",
        '<p id="a"></p><p id="a"></p>',
        '<use href="#nowhere"></use>',
        '<p style="background: url(a.png)"></p>',
        "<b><i></b></i>",
    ],
)
def test_the_laws_of_a_page_see_what_breaks_them(bad):
    assert broken_laws("<p>fine</p>") == []
    assert broken_laws(bad) != []


def test_every_section_of_a_run_with_memory_is_there(points):
    page = Page(read(points))
    headings = ["Learning", "Test results", "Memory", "Sample tasks", "Configuration"]
    for heading in headings:
        assert heading in page.text
    # loss, validation, forest, steps, four of turnover, map, and a task of each family
    assert len(page.all("svg")) == 2 + 2 + 4 + 1 + 4
    assert "MAML + EMO on regression:hsml4" in page.text
    assert "filled" in page.text
    assert 'source = [ "regression:hsml4", ]' in page.text
    assert "torch.version" in page.text


def test_the_table_of_results_holds_means_that_a_loop_over_the_tasks_gives(points):
    page = Page(read(points))
    record = json.loads((points / "eval-test-standard.json").read_text())
    cells = page.text
    for d, name in enumerate(record["domains"]):
        last = [s[-1] for s, k in zip(record["per_task"], record["domain"], strict=True) if k == d]
        if last:
            mean = sum(last) / len(last)
            shown = f"{mean:.3f}" if mean < 1 else f"{mean:.2f}" if mean < 100 else f"{mean:.1f}"
            assert f" {name} " in cells
            assert shown in cells, (name, shown)


def test_synthetic_tasks_are_called_synthetic_in_every_section_with_numbers(points, pictures):
    for root in (points, pictures):
        text = read(root)
        for section in ("learning", "results", "memory", "episodes"):
            part = text[text.index(f'<section id="{section}">') :]
            assert "synthetic data" in part[: part.index("</section>")], section
        assert "The tasks are synthetic" in text


def test_a_run_on_one_domain_has_one_row_of_results_and_no_figure_by_domain(hostile, pictures):
    for run, rows, figures in ((hostile, 1, 1), (pictures, 5, 2)):
        results = read(run).split('id="results"')[1].split("</section>")[0]
        assert results.count('<th scope="row">') == rows
        assert results.count("<svg") == figures


def test_tasks_from_a_folder_are_not_called_synthetic(hostile):
    assert "synthetic" not in Page(read(hostile)).text


def test_names_from_files_are_text_and_never_markup(hostile):
    text = read(hostile)
    page = Page(text)
    assert "<script" not in text
    assert "onerror=alert(1)>" not in text
    assert HOSTILE_CLASS.format("")[:15] in page.text  # seen by the reader as it is written
    assert HOSTILE_DOMAIN in page.text
    assert "<i>hostile" in page.text
    alts = [a["alt"] for a in page.all("img")]
    assert any("<script>" in alt for alt in alts)


def test_sample_tasks_show_support_and_answers_of_every_domain(pictures):
    page = Page(read(pictures))
    alts = [a["alt"] for a in page.all("img")]
    assert sum(alt.startswith("Support") for alt in alts) == 4 * 2  # four domains, 2-way 1-shot
    queries = [alt for alt in alts if alt.startswith("Query")]
    assert len(queries) == 4 * 4
    for alt in queries:
        label, answer = (int(w.rstrip(",:")) for w in alt.split() if w.rstrip(",:").isdigit())
        assert alt.endswith("right" if label == answer else "wrong")


def test_reporting_changes_nothing_else_and_is_repeatable_to_the_byte(points, tmp_path):
    root = tmp_path / "points"
    shutil.copytree(points, root)
    before = digests_of_files(root)
    assert write_run_report(root) == root / "report.html"
    assert digests_of_files(root) == before
    assert read(root) == read(points)


def test_a_large_memory_is_shown_by_its_fifty_most_recalled_slots(tmp_path):
    train = replace(POINTS.train, steps=35, validate_every=35)
    train_run(tmp_path, replace(POINTS, memory=POINTS.memory.set(capacity=60), train=train))
    write_run_report(tmp_path)
    text = read(tmp_path)
    assert "The 50 most recalled of 60 slots." in text
    table = text[text.index("The 50 most recalled") :]
    rows = re.findall(r"<tr><th scope=\"row\">(\d+)</th><td>\d+</td><td>([\d,]+)</td>", table)
    assert len(rows) == len({slot for slot, _ in rows}) == 50
    recalls = [int(count.replace(",", "")) for _, count in rows]
    assert recalls == sorted(recalls, reverse=True)
    assert "60 of 60 slots are filled, after 35 batches. 70 tasks were written, 10 of them" in text


@pytest.mark.parametrize(("stop", "own"), [(99, 3), (5, 1), (2, 0)])
def test_phases_of_learner_and_memory_are_told_with_what_each_had(stop, own, tmp_path):
    after = replace(PICTURES, memory=PICTURES.memory.set(steps=3))
    done = []
    train_run(
        tmp_path,
        after,
        should_stop=lambda: done.append(0) or len(done) >= stop,
    )
    write_run_report(tmp_path)
    text = Page(read(tmp_path)).text
    had = (
        f"The learner trained for {min(stop, 4)} of 4 outer steps; then it is frozen and the slots"
    )
    assert f"{had} train alone: they had {own} of 3 steps." in text
    assert f"outer steps {min(stop, 7)} of 7, seed 0" in text


def test_memories_that_train_with_the_learner_have_no_phases(points, pictures):
    for root in (points, pictures):
        assert "frozen" not in Page(read(root)).text


def test_a_learner_without_inner_steps_has_nothing_before_adaptation(tmp_path):
    learner = {"learner": Part("protonet"), "memory": Part("none")}
    make_run(tmp_path, replace(PICTURES, **learner), Protocol(tasks=6))
    write_run_report(tmp_path)
    text = Page(read(tmp_path)).text
    assert "ProtoNet on procedural" in text
    assert "before" not in text
    assert " 0 steps" not in text
    assert "inner step" not in text
    assert re.search(r"\d of 4 queries right\.", text)
    assert broken_laws(read(tmp_path)) == []


NOT_KEPT = ("recalled", "familiar", "skips", "sha256")


@pytest.mark.parametrize("field", ["recalled", "familiar"], ids=["today", "earlier"])
@pytest.mark.parametrize(("share", "said"), [(0.75, True), (1.0, False), (None, False)])
def test_tasks_that_skip_recall_are_told_with_the_result(points, tmp_path, field, share, said):
    record = json.loads((points / "eval-test-standard.json").read_text())
    record = {name: value for name, value in record.items() if name not in NOT_KEPT}
    shutil.copy(points / "config.toml", tmp_path)
    edited = with_digest({**record, field: share})
    (tmp_path / "eval-test-standard.json").write_text(json.dumps(edited))
    write_run_report(tmp_path)
    text = Page(read(tmp_path)).text
    assert ("25.0 % of the tasks skip recall." in text) is said
    assert ("skip recall" in text) is said


def test_options_that_differ_are_those_that_were_chosen(points):
    part = read(points).split('<dl class="options">')[1].split("</dl>")[0]
    shown = dict(re.findall(r"<dt><code>(.*?)</code></dt><dd><code>(.*?)</code></dd>", part))
    assert shown == {
        "learner.inner_lr": "0.01",
        "learner.steps": "2",
        "model.name": "&#34;mlp&#34;",
        "model.hidden": "[6]",
        "memory.name": "&#34;gradients&#34;",
        "memory.capacity": "5",
        "memory.k": "3",
        "memory.recall_dropout": "0.3",
        "memory.key.embedder": "&#34;pairs&#34;",
        **{f"memory.key.{name}": str(value) for name, value in SMALL_KEY.items()},
        "data.source": "[&#34;regression:hsml4&#34;]",
        "data.n_shot": "4",
        "data.n_query": "4",
        "train.steps": "9",
        "train.tasks": "2",
        "train.validate_every": "4",
        "train.validation_tasks": "4",
    }


def test_a_run_that_has_only_just_begun_says_so_section_by_section(points, tmp_path):
    shutil.copy(points / "config.toml", tmp_path)
    write_run_report(tmp_path)
    text = Page(read(tmp_path)).text
    assert broken_laws(read(tmp_path)) == []
    assert "There is no log of training yet." in text
    assert "has not been evaluated" in text
    assert "The memory cannot be shown: the run has no checkpoint" in text
    assert "Sample tasks cannot be shown: the run has no checkpoint" in text
    assert "The environment of the run is not known." in text


def test_damaged_files_leave_their_section_out_and_are_named(points, tmp_path):
    for name in ("config.toml", "events.jsonl", "environment.json", "eval-test-standard.json"):
        shutil.copy(points / name, tmp_path)
    (tmp_path / "eval-val-paper.json").write_text("{")
    record = json.loads((points / "eval-test-standard.json").read_text())
    record["per_task"][0] = record["per_task"][0][:-1]
    (tmp_path / "eval-test-paper.json").write_text(json.dumps(record))
    log = (points / "events.jsonl").read_text()
    (tmp_path / "events.jsonl").write_text("<b>not json</b>\n" + log)
    (tmp_path / "environment.json").write_text("[]")
    write_run_report(tmp_path)
    page = Page(read(tmp_path))
    assert "The log is damaged: events.jsonl, line 1" in page.text
    assert "A result was left out: eval-val-paper.json" in page.text
    assert "A result was left out: eval-test-paper.json" in page.text
    assert "environment.json cannot be read." in page.text
    assert str(tmp_path) not in page.text
    assert "test tasks, standard protocol" in page.text
    assert not page.all("b")


def test_a_torn_last_line_of_the_log_is_no_problem(points, tmp_path):
    shutil.copy(points / "config.toml", tmp_path)
    log = (points / "events.jsonl").read_text()
    (tmp_path / "events.jsonl").write_text(log + '{"event": "step", "st')
    write_run_report(tmp_path)
    page = Page(read(tmp_path))
    assert "damaged" not in page.text
    assert any("Training loss" in a["aria-label"] for a in page.all("svg"))


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run"):
        write_run_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
