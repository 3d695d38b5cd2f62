"""Costs: counted where they can be, timed where they must be, and nothing is trained."""

from tests.lab.study.conftest import tiny_study
from torchemo.lab.study.cost import measure_cost
from torchemo.lab.study.entry import Cell


def cost_of(preset):
    cells = (Cell("x", "X", preset, "memory"),)
    study = tiny_study(cells=cells, contrasts=())
    config = study.config(cells[0], {"mixed": ("regression:hsml4",)})
    return config, measure_cost(config)


def test_a_learner_without_memory_adds_nothing():
    config, found = cost_of("maml")
    # One hidden layer of three: 3 + 3 weights and biases in, 3 + 1 out.
    assert config.model.options["hidden"] == (3,)
    assert found["parameters"] == 10
    assert found["memory_parameters"] == found["memory_bytes"] == 0
    assert len(found["inner_ms"]) == config.learner.options["steps"] + 1


def test_a_memory_is_counted_and_what_comes_before_the_first_step_takes_longer_with_it():
    base, emo = cost_of("maml")[1], cost_of("maml-emo-paper")[1]
    assert emo["parameters"] == base["parameters"]
    assert emo["memory_parameters"] > 0
    # Six slots of a key of 8 and a gradient of 10 numbers, four bytes each, and their book-keeping.
    assert emo["memory_bytes"] > 6 * 4 * (8 + 10)
    assert emo["inner_ms"][0] > base["inner_ms"][0]
    assert emo["outer_step_ms"] > 0


def test_slots_of_offsets_are_recalled_while_they_are_timed(monkeypatch):
    from torchemo.lab.study import cost

    opened = []
    real = cost.open_experiment
    monkeypatch.setattr(
        cost, "open_experiment", lambda c, **k: opened.append(real(c, **k)) or opened[-1]
    )
    cost_of("maml-offsets-joint")
    assert len(opened[0].trainer.memory.store) > 0
