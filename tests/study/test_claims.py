"""What a result says about claims and entries: which contrasts count for which reading of EMO."""

import pytest

from torchemo.study.claims import claim_findings, entry_findings


def cell(name, preset=None, role="base", of=None):
    return {"name": name, "preset": preset or name, "role": role, "of": of}


def contrast(first, second, value=1.0, claims=()):
    """A difference in accuracy with an interval of one point to both sides."""
    row = {"value": value, "low": value - 1, "high": value + 1, "n": 9}
    return {
        "name": f"{first} vs {second}",
        "cell": first,
        "against": second,
        "expect": "better",
        "claims": list(claims),
        "paper": None,
        "diverged": [],
        "metric": "accuracy",
        "over_tasks": row,
        "per_domain": {},
        "relative": None,
        "verdict": "holds" if value > 1 else "does not hold",
    }


def result(entry, cells, contrasts):
    return {"entry": entry, "cells": cells, "contrasts": contrasts, "scale": "cpu"}


MEMORY = [cell("maml-emo", role="emo"), cell("maml-emo-paper", role="emo")]


@pytest.mark.parametrize(("base", "verdict"), [(2.0, "holds"), (0.0, "does not hold")])
def test_what_is_said_of_learners_without_memory_counts_for_every_reading(base, verdict):
    cells = [cell("maml"), cell("maml momentum", "maml"), *MEMORY]
    found = entry_findings(
        result(
            "T2",
            cells,
            [
                contrast("maml-emo", "maml", 2.0),
                contrast("maml-emo-paper", "maml", 2.0),
                contrast("maml", "maml momentum", base),
            ],
        )
    )
    assert {finding.reading: finding.verdict for finding in found} == {
        "ours": verdict,
        "literal": verdict,
    }
    assert all("maml vs maml momentum" in finding.ours for finding in found)


def test_a_learner_that_takes_the_rates_of_another_is_no_control():
    cells = [cell("maml"), cell("arml", of="maml"), cell("arml-emo", role="emo", of="maml")]
    cells.append(cell("maml longer", "maml", of="maml"))
    pairs = [("arml-emo", "arml"), ("arml-emo", "maml longer")]
    (found,) = entry_findings(result("T7", cells, [contrast(*pair, 2.0) for pair in pairs]))
    assert found.verdict == "holds"
    assert "arml-emo vs arml: " in found.ours
    assert "maml longer" not in found.ours
    assert found.ours.endswith("better than 1 of 1 controls")


def test_a_cell_may_say_which_reading_it_has_where_its_preset_does_not():
    cells = [cell("maml"), cell("T=100", "maml-emo-paper", "emo")]
    cells.append({**cell("T=100 mended", "maml-emo-paper", "emo"), "reading": "mended"})
    pairs = [contrast(one["name"], "maml", 2.0, claims=["C4"]) for one in cells[1:]]
    found = claim_findings("C4", result("F3", cells, pairs))
    assert {finding.reading for finding in found} == {"literal", "mended"}


def test_what_the_paper_claims_counts_also_of_cells_that_share_their_rates():
    cells = [cell("maml"), cell("T=100", "maml-emo-paper", "emo")]
    cells.append(cell("T=20", "maml-emo-paper", "emo", of="T=100"))
    pairs = [contrast("T=100", "T=20", 0.0, claims=["C4"])]
    (found,) = entry_findings(result("F3", cells, pairs))
    assert found.verdict == "does not hold"
    assert "T=100 vs T=20" in found.ours
    assert "controls" not in found.ours


def test_controls_after_all_steps_are_not_held_against_fewer():
    cells = [cell("maml"), *MEMORY, cell("maml-emo/one-slot", "maml-emo", "control", "maml-emo")]
    pairs = [contrast("maml-emo", "maml", claims=["C2"]), contrast("maml-emo", "maml-emo/one-slot")]
    for entry, said in (("F2", False), ("T2", True)):
        (found,) = claim_findings("C2", result(entry, cells, pairs))
        assert ("controls" in found.ours) is said
