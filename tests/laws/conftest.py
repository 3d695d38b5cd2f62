"""Which combinations the unit tier leaves to the slow one."""

import pytest

FAMILY = ("arml", "hsml", "tsa-maml", "musml", "bmg")
"""Learners around MAML: their seams with rules and aggregators are MAML's, so fewer pairs say as much."""


def pytest_collection_modifyitems(items):
    for item in items:
        chosen = getattr(getattr(item, "callspec", None), "params", {})
        if not str(chosen.get("case", "")).startswith(FAMILY):
            continue
        kept = (None, "sum", "consolidate")
        if "finite_differences" in item.name:
            kept = (None,) if chosen["case"] in ("arml", "hsml") else (None, "consolidate")
        if chosen.get("rule", "sgd") != "sgd" or chosen.get("emo_case") not in kept:
            item.add_marker(pytest.mark.slow)
