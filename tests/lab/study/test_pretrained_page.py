"""The page about pretrained networks shows what is recorded, and its words agree with it."""

import json
from pathlib import Path

import pytest

from torchemo.lab.study.pages.inserts import with_tables
from torchemo.lab.study.verdict import interval_of

ROOT = Path(__file__).parents[3]
RECORD = json.loads((ROOT / "studies/P1-cpu-images.json").read_text())


def difference(name):
    (found,) = (c for c in RECORD["contrasts"] if c["name"] == name)
    return found


def test_the_tables_are_those_of_the_record():
    page = (ROOT / "docs/pretrained.md").read_text(encoding="utf-8")
    assert with_tables(page, ROOT / "studies") == page


@pytest.mark.parametrize("shot", ["", " 5-shot"])
def test_the_recommended_preset_is_not_below_nearest_mean_on_any_set(shot):
    name = f"adapted-mean-offsets{shot} vs nearest-mean{shot}"
    found = difference(name)
    assert interval_of(found)["low"] > 0
    assert all(row["high"] >= 0 for row in found["per_domain"].values())
    assert len(found["per_domain"]) == 4
    assert interval_of(difference(f"{name}, outside textures"))["high"] >= 0


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("adapted-mean-offsets vs nearest-mean", 5),
        ("adapted-mean-offsets 5-shot vs nearest-mean 5-shot", 3),
        ("adapted-mean vs nearest-mean, outside textures", -3),
        ("adapted-mean 5-shot vs nearest-mean 5-shot, outside textures", -1),
        ("protonet vs nearest-mean", 3),
        ("protonet-offsets vs protonet", 1),
        ("metaoptnet-ridge-offsets vs metaoptnet-ridge", 1),
        ("maml-emo 5-shot vs maml 5-shot, outside textures", -3),
    ],
)
def test_numbers_in_words_are_the_recorded_ones(name, points):
    assert round(100 * interval_of(difference(name))["value"]) == points
