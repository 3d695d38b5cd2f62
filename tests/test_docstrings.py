"""Every example in a docstring runs, and gives what it says."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import torchemo

ROOT = Path(torchemo.__file__).parent
MODULES = sorted(
    ".".join(("torchemo", *path.relative_to(ROOT).with_suffix("").parts))
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8") and path.name != "__init__.py"
)


def test_there_are_examples():
    assert len(MODULES) > 10


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_hold(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted == inspect.getsource(module).count(">>> ")
