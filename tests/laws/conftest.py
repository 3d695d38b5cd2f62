"""Which combinations of the laws belong to the unit tier, and which to the slow one."""

import pytest

FAMILY = ("arml", "hsml", "tsa-maml", "musml", "bmg")
"""Learners around MAML: their seams with rules and aggregators are MAML's, so fewer pairs say as much."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name != "laws":
            continue
        chosen = getattr(getattr(item, "callspec", None), "params", {})
        fused = item.path.name == "test_fused.py" and costly_on_the_block(chosen)
        if fused or costly_around_maml(item.name, chosen):
            item.add_marker(pytest.mark.slow)


def costly_on_the_block(chosen):
    costly = chosen.get("emo_case") in ("gate", "coordinate", "mean", "gated")
    variant = "/" in chosen["case"] or chosen.get("rule", "sgd") != "sgd"
    like_another = chosen["case"] in ("fomaml", "boil", "reptile", "maml++", *FAMILY)
    costly |= like_another and chosen.get("emo_case") is not None
    clock = chosen.get("controller", "lru") != "lru"
    return costly or variant or clock


def costly_around_maml(test, chosen):
    case = str(chosen.get("case", ""))
    kept = (None, "sum", "consolidate")
    if "finite_differences" in test:
        kept = (None,) if case in ("arml", "hsml") else (None, "consolidate")
    thin = chosen.get("rule", "sgd") != "sgd" or chosen.get("emo_case") not in kept
    return case.startswith(FAMILY) and thin
