"""Which combinations of learners, aggregators, rules and controllers belong to the unit tier.

What is not in the unit tier is in the slow one. In the unit tier MAML meets everything, and every other
learner meets the plain cases. In both together every two of a learner, a memory and a rule meet on the smooth
network; the compiled block, which knows nothing of memories and rules, meets each of them.
"""

import gc
import os

import pytest
import torch

import tests.pretend  # noqa: F401  # torch takes a device in before its first gradient, not after
from tests.browsing import browser, chromium  # noqa: F401  # fixtures of tests in a browser
from tests.warm import Warm

FULL = ("maml",)
"""Learners that meet everything in the unit tier."""
PLAIN = (None, "sum", "offsets")
"""Memories that every learner meets in the unit tier."""
FAMILY = ("arml", "hsml", "tsa-maml", "musml", "bmg")
"""Learners around MAML: their seams with memories are MAML's, so the unit tier meets them without."""
DEEP = ("hvm",)
"""Learners that read maps of several depths, which the compiled block does not give."""
MATRICES = ("laws", "test_workers.py", "test_train.py", "test_learning.py")


LONG = ("omniglot_five_way", "attack_of_a_few_seconds", "site_builds", "on_a_real_disk")
"""Tests of many seconds: begun last, they would leave one process alone with them."""


SYNC = os.fsync


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Let nothing wait for the disk but tests of faults: the others see files alike without."""
    os.fsync = SYNC if item.get_closest_marker("faults") else lambda handle: None


def pytest_collection_finish():
    """Let no collection of garbage look again at what imports and tests themselves take."""
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    alone = accelerator is None or accelerator.type == "pretend"
    dropped = [
        item
        for item in items
        if is_triple(item.path.name, params_of(item)) or (alone and item.get_closest_marker("gpu"))
    ]
    config.hook.pytest_deselected(items=dropped)
    kept = set(items) - set(dropped)
    items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: not any(part in item.name for part in LONG))
    for item in items:
        if not {item.path.parent.name, item.path.name} & set(MATRICES):
            continue
        if is_costly(item.path.name, item.name, params_of(item)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def warm():
    """What starts commands in processes of their own."""
    made = Warm()
    yield made
    made.end()


def params_of(item):
    return getattr(getattr(item, "callspec", None), "params", {})


def is_triple(module, chosen):
    """Whether each two of this learner, this memory, this rule and the compiled block meet elsewhere."""
    case, memory = chosen.get("case"), chosen.get("memory_case")
    if module != "test_fused.py" or case in FULL:
        return False
    simple = chosen.get("rule", "sgd") == "sgd" or memory in (None, "offsets")
    return case in DEEP or memory not in PLAIN or not simple


def is_costly(module, test, chosen):
    learner = str(chosen.get("case") or chosen.get("learner") or chosen.get("name") or "maml")
    if module == "test_train.py":
        return learner not in (*FULL, "tsa-maml") or (
            learner != "maml" and chosen.get("memory") == "gradients"
        )
    if module == "test_learning.py":
        return learner not in (*FULL, "proto-maml", "protonet")
    if module == "test_fused.py":
        return not plain(chosen) or learner not in ("maml", "anil")
    if "finite_differences" in test and learner not in FULL and chosen.get("memory_case"):
        return True
    if learner in FULL:
        return module == "test_workers.py" and not plain(chosen)
    if learner.startswith(FAMILY):
        return not plain(chosen) or "/" in learner or bool(chosen.get("memory_case"))
    return not plain(chosen)


def plain(chosen):
    """Whether a combination has SGD, LRU and a plain memory or none."""
    usual = (chosen.get("rule", "sgd"), chosen.get("controller", "lru")) == ("sgd", "lru")
    return usual and chosen.get("memory_case") in PLAIN
