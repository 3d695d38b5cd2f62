"""Figures of results: what is drawn where not all fits, what pages link, missing ones named."""

import numpy as np
import pytest

from tests.lab.study.test_command import ROOT
from torchemo.core.errors import DataError
from torchemo.lab.study.pages.drawings import matrix
from torchemo.lab.study.pages.figures import figures, named_figures
from torchemo.lab.study.pages.linked import linked_figures
from torchemo.lab.study.records import read_result

RECORD = ROOT / "studies" / "T7-cpu-regression.json"


def test_the_figures_of_the_pages_are_those_of_the_records():
    found = {}
    for page in (ROOT / name for name in ("README.md", "docs/findings.md", "docs/results.md")):
        found |= linked_figures(page.read_text(), page.parent, ROOT / "studies")
    assert found
    for path, text in found.items():
        assert path.read_text() == text, "run: make reproducibility"


def test_a_figure_that_a_record_does_not_have_is_named(tmp_path):
    assert "mixed" in named_figures(read_result(RECORD))
    page = "![a](figures/T7-cpu-regression-nowhere.svg)"
    with pytest.raises(DataError, match="no figure 'nowhere'"):
        linked_figures(page, tmp_path, ROOT / "studies")


def swept(name, value, preset="maml-emo-paper", variant="mixed"):
    mean = {"value": value, "low": value - 0.1, "high": value + 0.1}
    tests = {"mixed": {"metric": "mse", "mean": mean, "seed_means": [value]}}
    about = {"name": name, "preset": preset, "role": "memory", "world": "mixed", "of": None}
    return {**about, "tests": tests, "variant": variant}


def test_a_sweep_has_a_line_per_variant_and_all_begin_without_memory():
    base = {**swept("maml", 1.0, "maml"), "role": "base"}
    cells = [base, swept("T=20 mixed", 3.0), swept("T=20 repaired", 0.9, variant="repaired")]
    cells += [swept(f"T={n} offsets", v, "maml-offsets", None) for n, v in ((8, 0.4), (2, 0.6))]
    drawn = named_figures({"entry": "F3", "cells": cells})
    assert list(drawn) == ["sweep"]
    text = str(drawn["sweep"][1])
    assert all(f">{variant}, 1-shot<" in text for variant in ("mixed", "repaired", "offsets"))
    assert [text.index(f">{size}<") for size in (0, 2, 8, 20)] == sorted(
        text.index(f">{size}<") for size in (0, 2, 8, 20)
    )


def test_claims_are_drawn_where_not_all_contrasts_fit_one_figure():
    row = {"value": 0.0, "low": -1.0, "high": 1.0}
    about = {"against": "maml", "diverged": [], "metric": "mse", "over_tasks": row}
    many = [{**about, "name": f"other {i}", "expect": "shown", "claims": []} for i in range(40)]
    last = {**about, "name": "the claim", "expect": "better", "claims": ["C1"]}
    cells = [{**swept("maml", 1.0, "maml"), "role": "base", "curve": None, "recall": None}]
    drawn = figures({"entry": "T1", "cells": cells, "contrasts": [*many, last]})
    caption, figure = drawn[0]
    assert ">the claim<" in str(figure)
    assert ">other 22<" in str(figure)
    assert ">other 23<" not in str(figure)
    assert "17 more are in the table" in caption


def test_a_matrix_of_errors_shows_shares_of_them_and_names_what_has_no_result():
    worlds = {"first": ["regression:sine"], "second": ["regression:line"]}

    def trained(preset, world, **errors):
        tests = {w: {"metric": "mse", "mean": {"value": e}} for w, e in errors.items()}
        role = "base" if preset == "maml" else "memory"
        about = {"name": f"{preset} there", "preset": preset, "world": world, "role": role}
        return {**about, "tests": tests}

    cells = [trained("maml", "first", first=0.5, second=4e8)]
    cells += [trained("maml", "second", first=2.0, second=0.25), trained("maml-offsets", "first")]
    about = {"against": "", "diverged": [], "metric": "mse"}
    contrasts = [
        {**about, "cell": "maml-offsets there", "test": tested, "over_tasks": {"value": value}}
        for tested, value in (("first", -0.3), ("second", -4e8))
    ]
    result = {"entry": "F5", "cells": cells, "contrasts": contrasts, "worlds": worlds}
    drawn = named_figures(result)
    assert list(drawn) == ["maml", "maml-offsets"]
    (_, base), (caption, gains) = drawn.values()
    assert all(f">{text}<" in str(base) for text in ("0.50", "4e+08", "2.00", "0.25"))
    assert "% of its error" in caption
    assert all(f">{text}<" in str(gains) for text in ("-60.0", "-100", "no result"))


def test_one_value_off_by_orders_of_magnitude_leaves_the_others_their_shades():
    usual = np.array([[1.0, 2.0], [3.0, 4.0]])
    drawn = [
        matrix(np.where(usual == 4.0, last, usual), ("a", "b"), name="m") for last in (7.5, 1e9)
    ]
    assert str(drawn[0]).replace("7.50", "1e+09") == str(drawn[1])
