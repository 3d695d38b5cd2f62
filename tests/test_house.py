"""The rules of the house: packages, layers, sizes, and who may know whom."""

import ast
import re
from functools import cache
from pathlib import Path

import torchemo

ROOT = Path(torchemo.__file__).parent
PACKAGES = {
    "apps",
    "config",
    "core",
    "data",
    "interop",
    "lab",
    "learners",
    "memory",
    "models",
    "report",
    "runs",
    "training",
}
MOST_LINES, MOST_MODULES, LONGEST = 400, 16, 40
LONG_FILES = {"config/run.py", "memory/emo.py"}
FULL_FOLDERS = {"lab/bench"}
LONG_FUNCTIONS = {
    "data/load.py:load",
    "interop/for_module.py:for_module",
    "interop/one_task.py:combine_one",
    "lab/bench/peers.py:plain_loop",
    "lab/bench/record.py:measure_all",
    "lab/study/pages/drawings.py:matrix",
    "lab/study/plan.py:plan",
    "learners/gradient/inner.py:adapt",
    "learners/gradient/loop.py:run",
    "memory/emo.py:_check",
    "memory/recall.py:forward",
    "models/fused/conv_block.py:conv_block",
    "report/figures.py:forest",
    "runs/adapt.py:answer_folder",
    "runs/build.py:build_emo",
    "runs/build.py:remembered_shapes",
    "training/evaluate.py:evaluate",
    "training/evaluate.py:evaluate_trust",
    "training/heads.py:solve_heads",
    "training/solve.py:solve",
    "training/step.py:outer_step",
    "training/step.py:predict",
}
ASK_FOR_CONCRETE_PARTS = {
    "lab/study/diagnosis.py",
    "runs/adapt.py",
    "runs/build.py",
    "runs/score.py",
}
READ_THE_LOOP = {
    "lab/bench/memory.py",
    "lab/bench/training.py",
    "lab/study/cost.py",
    "learners/learner.py",
    "runs/adapt.py",
    "runs/build.py",
    "runs/footprint.py",
    "runs/score.py",
    "training/evaluate.py",
    "training/heads.py",
    "training/solve.py",
    "training/step.py",
}
"""What still breaks a rule. These sets may only shrink: what no longer breaks its rule must leave them."""

CONCRETE = {
    "learners": r"(\w*MAML\w*|ANIL|BOIL|ARML|HSML|BMG|MUSML|MetaSGD|Reptile|TaskGated|\w+Net)",
    "memory": r"(Mean|Sum|Gated|GateTransformer|CoordinateTransformer|FIFO|LRU|Clock)",
}
"""Names of learners, and of aggregators and controllers, with the package that may ask for them."""


@cache
def sources():
    """Every module of the package as ``{name: text}``."""
    return {
        p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in sorted(ROOT.rglob("*.py"))
    }


def imports_of(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_there_are_twelve_packages_and_nothing_else():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith("__")}
    assert found == PACKAGES | {"py.typed"}


def test_nothing_imports_the_lab():
    outside = {name: text for name, text in sources().items() if not name.startswith("lab/")}
    guilty = {
        n for n, t in outside.items() if any(i.startswith("torchemo.lab") for i in imports_of(t))
    }
    assert not guilty


def test_no_file_is_too_long():
    assert {n for n, t in sources().items() if len(t.splitlines()) > MOST_LINES} == LONG_FILES


def test_no_folder_is_too_full():
    folders = [name.rpartition("/")[0] for name in sources()]
    assert {folder for folder in folders if folders.count(folder) > MOST_MODULES} == FULL_FOLDERS


def test_no_function_is_too_long():
    long = {
        f"{name}:{node.name}"
        for name, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > LONGEST
    }
    assert long == LONG_FUNCTIONS


def test_only_its_own_package_asks_for_a_concrete_part():
    guilty = {
        name
        for name, text in sources().items()
        for package, pattern in CONCRETE.items()
        if not name.startswith(f"{package}/")
        and re.search(rf"isinstance\([^)]*\b{pattern}\b[^)]*\)", text)
    }
    assert guilty == ASK_FOR_CONCRETE_PARTS


def test_only_gradient_learners_know_their_inner_loop():
    reads = re.compile(r"learner\.loop\b")
    guilty = {
        name
        for name, text in sources().items()
        if not name.startswith("learners/gradient/") and reads.search(text)
    }
    assert guilty == READ_THE_LOOP
