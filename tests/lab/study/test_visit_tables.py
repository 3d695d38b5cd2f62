"""Tables of tasks that come back: one column per task set, one row per method or pair."""

from torchemo.lab.study.pages.tables import gains_by_set
from torchemo.lab.study.pages.visit_tables import found_by_visit, kept_by_visit, last_by_set


def cell(kind, place, world, scores, find="names", **noted):
    """A recorded cell that was tested on tasks that come back."""
    noted = {"ms": 0.5, "hits": [None, 0.25], "precision": [None, 0.5], **noted}
    test = {"metric": "accuracy", "per_step": scores, "visits": noted}
    return {
        "name": f"anil {place} {kind}",
        "title": f"ANIL, {kind}",
        "role": "memory",
        "world": world,
        "visits": {"find": find},
        "tests": {world: test},
    }


CELLS = [
    cell("none", "birds", "first", [0.5, 0.6], find="nothing"),
    cell("none", "flowers", "fourth", [0.7, 0.8], find="nothing"),
    cell("names", "flowers", "fourth", [0.7, 0.9], bytes=12_900),
]


def test_the_last_visit_has_a_column_per_task_set():
    found = last_by_set(CELLS)
    assert found.columns == ("method", "birds", "flowers")
    assert list(found.rows) == [
        ("ANIL, none", "60.00", "80.00"),
        ("ANIL, names", "", "90.00"),
    ]


def difference(place, value, **changes):
    row = {"value": value, "low": value - 0.01, "high": value + 0.01}
    return {
        "name": f"anil {place} names vs none",
        "cell": f"anil {place} names",
        "diverged": [],
        "metric": "accuracy",
        "over_tasks": row,
        "relative": 0.1,
        **changes,
    }


def test_gains_have_a_row_per_pair_and_a_column_per_task_set():
    found = gains_by_set(
        [difference("birds", 0.02), difference("flowers", 0.0, diverged=["anil flowers none"])]
    )
    assert found.columns == ("first minus second", "birds", "flowers")
    (row,) = found.rows
    assert row == ("anil names vs none", "+2.00 [+1.00, +3.00]", "anil flowers none diverged")


def test_what_a_visit_costs_is_shown_where_it_was_noted():
    assert [row[1:] for row in kept_by_visit(CELLS).rows] == [
        ("", "0.50"), ("", "0.50"), ("12.9", "0.50"),
    ]  # fmt: skip


def test_rows_of_several_task_sets_say_which_they_are_of():
    birds, flowers = (cell("images", p, p, [0.5], find="task ratio") for p in ("birds", "flowers"))
    assert [row[0] for row in found_by_visit([birds, flowers]).rows] == [
        "ANIL, images, birds",
        "ANIL, images, flowers",
    ]
    assert [row[0] for row in found_by_visit([birds]).rows] == ["ANIL, images"]
