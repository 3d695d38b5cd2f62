"""The public surface fits one screen and does not wait for torch."""

import doctest
import inspect
import re
import subprocess
import sys

import pytest
import torch

import torchemo


def test_every_public_name_loads_and_there_are_at_most_thirty():
    assert len(torchemo.__all__) <= 30
    for name in torchemo.__all__:
        assert getattr(torchemo, name) is not None
    assert set(torchemo.__all__) <= set(dir(torchemo))


@pytest.mark.parametrize("name", torchemo.__all__)
def test_a_public_name_is_no_module_and_has_an_example_that_runs(name):
    thing = getattr(torchemo, name)
    assert not inspect.ismodule(thing)
    home = inspect.getmodule(thing)
    # test_docstrings.py runs the examples of every module.
    examples = [e for found in doctest.DocTestFinder().find(home) for e in found.examples]
    assert any(re.search(rf"\b{name}\b", example.source) for example in examples)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Emo'"):
        torchemo.Emo  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    code = "import sys, torchemo, torchemo.config.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_people_print_fits_a_few_lines():
    emo = torchemo.for_module(torch.nn.Linear(2, 1), k=5, capacity=10, key_dim=3)
    assert "0 of 10 slots filled" in repr(emo)
    assert "k=5" in repr(emo)
    assert repr(emo.recall(torch.zeros(2, 3))) == "Recall(0 slots for each of 2 tasks, used by 2)"
