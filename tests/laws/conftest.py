"""Which combinations of the laws on the compiled block belong to the unit tier."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name == "test_fused.py" and item.path.parent.name == "laws":
            case = item.callspec.params
            costly = case.get("emo_case") in ("gate", "coordinate", "mean", "gated")
            variant = "/" in case["case"] or case.get("rule", "sgd") != "sgd"
            like_another = case["case"] in ("fomaml", "boil", "reptile", "maml++")
            costly |= like_another and case.get("emo_case") is not None
            clock = case.get("controller", "lru") != "lru"
            if costly or variant or clock:
                item.add_marker(pytest.mark.slow)
