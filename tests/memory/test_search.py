"""The registry of searches: every one by its name, and none imported before it is asked for."""

import subprocess
import sys

import pytest

from torchemo.core.errors import ConfigError
from torchemo.memory.scale.approximate import ApproximateIndex
from torchemo.memory.scale.compressed import CompressedIndex
from torchemo.memory.search import INDICES, ExactIndex, Following, Index, RandomIndex


def test_the_registry_names_every_index():
    named = {"exact": ExactIndex, "random": RandomIndex, "approximate": ApproximateIndex}
    assert named | {"ivfpq": CompressedIndex} == INDICES
    assert all(issubclass(made, Index) for made in INDICES.values())


def test_only_approximate_indices_follow_the_writes_of_a_memory():
    following = [name for name, made in INDICES.items() if issubclass(made, Following)]
    assert following == ["approximate", "ivfpq"]


def test_an_unknown_index_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="no index 'exct'") as caught:
        INDICES["exct"]
    assert "'exact'" in caught.value.hint


def test_approximate_search_is_imported_when_it_is_asked_for():
    asked = """
import sys
import torchemo.memory.emo, torchemo.memory.offsets
from torchemo.memory.search import INDICES
for name in ("exact", "random", "approximate"):
    INDICES[name]
    print(name, "torchemo.memory.scale.approximate" in sys.modules, "faiss" in sys.modules)
"""
    found = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == [
        "exact False False",
        "random False False",
        "approximate True False",
    ]
