"""Tables in pages: made from the records, asked for by name, and the words around them left alone."""

import pytest

from tests.lab.study.test_command import a_contrast, write_record
from torchemo.core.errors import DataError
from torchemo.lab.study.pages.inserts import with_tables

RECORD = "T1-cpu-regression"


def page(kind="contrasts", rows="offsets", record=RECORD):
    return f"Words.\n\n<!-- study {record} {kind}: {rows} -->\nold numbers\n<!-- end -->\nMore words.\n"


@pytest.fixture
def records(tmp_path):
    contrasts = [
        a_contrast("offsets", "maml-offsets", "maml", low=0.01, high=0.03),
        a_contrast("mixed", "maml-emo-mixed", "maml", low=-0.02, high=0.01),
    ]
    write_record(tmp_path, contrasts, scale="cpu", tasks="regression", command="the command")
    return tmp_path


def test_a_table_is_made_from_the_rows_that_are_asked_for(records):
    found = with_tables(page(), records)
    assert found.startswith("Words.\n")
    assert found.endswith("<!-- end -->\nMore words.\n")
    assert "old numbers" not in found
    assert "| offsets |" in found
    assert "mixed" not in found
    assert "+2.00" in found
    assert f"[{RECORD}.json](../{records.name}/{RECORD}.json): `the command`" in found


def test_rows_come_in_the_order_of_the_page(records):
    found = with_tables(page(rows="mix*; offsets"), records)
    assert found.index("| mixed |") < found.index("| offsets |")


def test_the_command_stands_under_the_first_table_of_its_record_alone(records):
    found = with_tables(page() + page(rows="mixed"), records)
    assert found.count(f"[{RECORD}.json]") == 2
    assert found.count("`the command`") == 1
    assert found.index("`the command`") < found.index("| mixed |")


@pytest.mark.parametrize(
    ("entry", "tasks", "said"),
    [
        ("T1", "images", "`c` (transductive)\n"),
        ("P1", "images", "`c` (inductive)\n"),
        ("T1", "regression", "`c`\n"),
    ],
)
def test_tables_of_images_say_how_queries_are_answered(tmp_path, entry, tasks, said):
    rows = [a_contrast("offsets", "maml-offsets", "maml", low=0.01, high=0.03)]
    write_record(tmp_path, rows, scale="cpu", tasks=tasks, command="c", entry=entry)
    assert said in with_tables(page(record=f"{entry}-cpu-{tasks}"), tmp_path)


def test_making_tables_anew_changes_nothing(records):
    once = with_tables(page(rows="*"), records)
    assert with_tables(once, records) == once


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (page(rows="nobody"), "no 'nobody' in the record"),
        (page(kind="stories"), "no tables of stories"),
        (page(record="T9-cpu-regression"), "T9-cpu-regression"),
    ],
)
def test_what_is_not_there_is_named(records, asked, said):
    with pytest.raises(DataError, match=said):
        with_tables(asked, records)
