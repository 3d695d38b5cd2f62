"""Plans: every entry resolves at every scale, runs are named by what decides them, controls are complete."""

import hashlib
from dataclasses import replace

import pytest

from tests.lab.study.conftest import TINY, tiny_study
from tests.lab.study.test_command import ROOT
from torchemo.config.presets import parts_of, preset
from torchemo.config.run import RunConfig
from torchemo.config.toml import from_dict, override, to_dict
from torchemo.core.errors import ConfigError
from torchemo.lab.study.catalogue import ENTRIES, entry_of
from torchemo.lab.study.controls import CONTROLS, control_options
from torchemo.lab.study.entry import MIXED, REPAIRED
from torchemo.lab.study.paper.cells import MIXED_OPTIONS, REPAIRED_OPTIONS
from torchemo.lab.study.paper.t7_to_t8 import TRAINED_LONGER
from torchemo.lab.study.plan import SCHEMA, minutes, plan, run_id
from torchemo.lab.study.records import read_result
from torchemo.lab.study.run import StudyRun
from torchemo.lab.study.scales import FOUR, ONCE, SCALES, SEEN, scale_of
from torchemo.runs.experiment import complete, reduced


def with_options(config, options):
    """Return a configuration with options set as on the command line."""
    plain = to_dict(config)
    for option in options:
        override(plain, option)
    return from_dict(plain, RunConfig, where="the test")


PLACES = [(name, where) for name, entry in ENTRIES.items() for where in entry.scales]


def test_there_is_an_entry_for_every_table_and_figure():
    of_paper = [name for name, entry in ENTRIES.items() if entry.in_paper]
    assert of_paper == [f"T{i}" for i in range(1, 10)] + [f"F{i}" for i in range(1, 8)]


def test_controls_may_be_of_some_cells_alone():
    def controlled(**options):
        study = plan(ENTRIES["T1"], SCALES["cpu/images"], **options)
        return {cell.name.split("/")[0] for cell in study.cells if cell.role == "control"}

    assert controlled() > {"maml-offsets", "anil-offsets", "meta-sgd-offsets"}
    some = controlled(controlled_cells=("maml-offsets", "anil-emo-m*"))
    assert some == {"maml-offsets", "anil-emo-mixed"}
    with pytest.raises(ConfigError, match="a name like maml"):
        controlled(controlled_cells=("maml",))
    assert not controlled(controlled_cells=("maml-offsets",), controls=False)


def test_controls_may_be_of_some_kinds_alone():
    named = ("*-offsets/one-slot", "anil-emo-mixed/no-memory")
    study = plan(ENTRIES["T1"], SCALES["cpu/regression"], chosen=("anil*",), controlled_cells=named)
    found = {cell.name for cell in study.cells if cell.role == "control"}
    assert {"anil-offsets/one-slot", "anil-emo-mixed/no-memory"} <= found
    assert all(name.endswith("/one-slot") for name in found - {"anil-emo-mixed/no-memory"})
    drawn = {c.against for c in study.contrasts}
    assert "anil-offsets/one-slot" in drawn
    assert "anil-offsets/no-memory" not in drawn


@pytest.mark.parametrize(("name", "where"), PLACES)
def test_every_cell_resolves_and_every_contrast_speaks_of_cells_that_exist(name, where):
    study = plan(ENTRIES[name], SCALES[where])
    names = [cell.name for cell in study.cells]
    assert len(set(names)) == len(names)
    everything = {cell.name for cell in ENTRIES[name].cells(SCALES[where])}
    for contrast in ENTRIES[name].contrasts(SCALES[where]):
        assert {contrast.cell, contrast.against} <= everything
    for cell in study.available:
        assert {*cell.tests, cell.world} - {SEEN, ONCE} <= set(SCALES[where].worlds)
        for rates in study.grid(cell):
            assert isinstance(study.config(cell, {}, rates=rates, seed=3), RunConfig)
    if where.startswith("cpu"):
        assert 0 < minutes(study) < 24 * 60


@pytest.mark.parametrize("name", [n for n, one in ENTRIES.items() if one.measure == "score"])
def test_every_cell_with_memory_is_set_against_all_of_its_controls(name):
    study = plan(ENTRIES[name], SCALES[ENTRIES[name].scales[0]])
    drawn = {(c.cell, c.against) for c in study.contrasts}
    for cell in study.available:
        if cell.role != "memory" or cell.visits is not None:
            continue  # tasks that come back have controls of their own
        wanted = {"no-memory", "random-retrieval", "random-gradients"}
        if study.config(cell, {}).memory.name == "offsets":
            wanted.add("one-slot")
        assert {(cell.name, f"{cell.name}/{control}") for control in wanted} <= drawn


def test_controls_are_also_set_against_the_learner_without_memory():
    study = plan(
        ENTRIES["T1"], SCALES["cpu/images"], chosen=("maml", "maml-offsets", "maml longer")
    )
    drawn = [(c.cell, c.against, c.expect) for c in study.contrasts if c.against == "maml"]
    assert ("maml-offsets/one-slot", "maml", "shown") in drawn
    assert ("maml-offsets/random-gradients", "maml", "shown") in drawn
    assert not [
        pair for pair in drawn if pair[0] == "maml-offsets/no-memory"
    ]  # they are the same runs


def test_a_control_changes_one_thing_and_takes_the_rates_of_its_cell():
    study = tiny_study(controls=True)
    control = next(c for c in study.cells if c.name == "maml-emo-paper/random-gradients")
    own = study.config(study.cells[1], {}, rates=TINY.grid[1])
    broken = study.config(control, {}, rates=TINY.grid[1])
    repaired = reduced(replace(broken, memory=broken.memory.set(control="none")))
    assert broken != own
    assert repaired == own
    assert control.of == "maml-emo-paper"
    assert study.chooser(control) == study.cells[1]


def test_variants_that_change_offsets_take_their_rates_and_so_do_their_controls():
    study = plan(entry_of("R1"), scale_of("cpu", "images"), chosen=("scales and shifts",))
    names = [cell.name for cell in study.cells]
    assert names[:3] == ["maml", "offsets", "scales and shifts"]
    assert "scales and shifts/one-slot" in names
    assert {study.chooser(cell).name for cell in study.cells} == {"maml"}


def test_controls_know_what_a_memory_of_offsets_needs():
    paper, ours = preset("maml-emo-paper"), preset("maml-offsets")
    assert control_options("one-slot", paper) is None
    assert control_options("one-slot", ours) == ("memory.capacity=1",)
    assert "memory.k=1" in (control_options("random-retrieval", ours) or ())
    assert control_options("random-retrieval", paper) == ("memory.index=random",)
    assert all(control_options(name, ours) for name in CONTROLS)


def test_without_memory_the_learner_has_all_the_outer_steps():
    joint, after = preset("maml-offsets-joint"), preset("maml-offsets")
    assert control_options("no-memory", joint) == ("memory.name=none",)
    assert after.outer_steps == 2 * after.train.steps
    assert control_options("no-memory", after) == (
        "memory.name=none",
        f"train.steps={after.outer_steps}",
    )


def test_options_of_a_scale_and_rates_apply_where_the_parts_of_a_cell_have_them():
    scale = SCALES["smoke/images"]
    scale = replace(scale, options=(*scale.options, "model.hidden=[3]", "learner.anneal=9"))
    study = plan(ENTRIES["T7"], scale, controls=False)
    found = {c.name: study.config(c, {}, rates=study.grid(c)[1]) for c in study.available}
    assert found["maml"].model.options == {"filters": 2}
    assert found["maml"].learner.options == {"steps": 2, "inner_lr": 0.2}
    assert found["maml"].memory.options == {}
    assert found["musml"].learner.options["anneal"] == 9
    # The inner loop of BMG is that of the learner underneath.
    assert found["bmg"].learner.options["base"].options == {"steps": 2, "inner_lr": 0.2}
    ours, papers = (complete(found[n]).memory.options for n in ("bmg-offsets", "arml-emo-mixed"))
    assert (ours["warmup"], ours["slot_lr"]) == (2, 1e-3)
    assert not {"warmup", "slot_lr"} & papers.keys()
    assert (ours["capacity"], papers["capacity"]) == (6, 6)
    keys = ours["key"].options, papers["key"].options
    assert [key["dim"] for key in keys] == [8, 8]
    assert ["layers" in key for key in keys] == [False, True]


def test_options_of_a_scale_reach_the_parts_that_a_cell_chooses():
    study = plan(ENTRIES["R1"], SCALES["smoke/regression"], chosen=("transformer", "4 slots"))
    cells = {cell.name: complete(study.config(cell, {})).memory.options for cell in study.cells}
    key = cells["transformer"]["key"]
    assert key.name == "transformer"
    assert (key.options["dim"], key.options["layers"]) == (8, 2)  # the second is the cell's own
    assert (cells["4 slots"]["capacity"], cells["transformer"]["capacity"]) == (4, 6)


def test_options_of_a_cell_must_be_options_of_its_parts():
    cell = replace(tiny_study().cells[1], options=("memory.slot_lr=0.1",))
    with pytest.raises(ConfigError, match=r"unknown option 'memory\.slot_lr'"):
        tiny_study(cells=(cell,), contrasts=(), controls=True)


def test_options_of_the_study_apply_where_they_are_known_and_must_be_known_somewhere():
    study = tiny_study(options=("memory.k=2", "learner.steps=4"), controls=True)
    found = {cell.name: complete(study.config(cell, {})) for cell in study.cells}
    assert {config.learner.options["steps"] for config in found.values()} == {4}
    assert found["maml-emo-paper"].memory.options["k"] == 2
    for name in ("maml", "maml-emo-paper/no-memory"):
        assert found[name].memory.options == {}
    for option in ("memory.slot_lr=0.1", "memory.neighbours=2", "learner.nothing=1"):
        with pytest.raises(ConfigError, match="unknown option"):
            tiny_study(options=(option,))


def test_a_run_is_named_by_what_decides_it_and_not_by_where_its_data_lie():
    study = tiny_study()
    here = study.config(study.cells[0], {"mixed": ("/here/birds-32px",)})
    there = study.config(study.cells[0], {"mixed": ("/there/birds-32px",)})
    other = study.config(study.cells[0], {"mixed": ("/here/fungi-32px",)})
    assert run_id(here) == run_id(there)
    names = {run_id(here), run_id(other)}
    names |= {run_id(study.config(study.cells[0], {}, seed=seed)) for seed in (0, 1)}
    names.add(run_id(study.config(study.cells[0], {}, rates=TINY.grid[1])))
    assert len(names) == 5


def test_a_run_is_named_by_the_options_that_differ_from_their_defaults():
    config = with_options(preset("maml-offsets-joint", regression=True), ("train.steps=50",))
    text = f"""schema = {SCHEMA}

[data]
n_query = 10
source = [
    "regression:hsml4",
]

[learner]
inner_lr = 0.003
name = "maml"

[memory]
capacity = 16
k = "unset"
name = "offsets"

[memory.key]
name = "learned-statistics"
training = "self_recognition"

[model]
name = "mlp"

[outer]

[train]
steps = 50
tasks = 16
"""
    assert run_id(config) == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert run_id(complete(config)) == run_id(config)
    assert run_id(with_options(config, ("memory.slot_decay=1.0",))) != run_id(config)


def test_without_slots_nothing_else_about_a_memory_matters_and_the_run_is_shared():
    study = tiny_study(controls=True)
    base, control = study.cells[0], study.cells[2]
    assert control.name == "maml-emo-paper/no-memory"
    shared = ("learner.inner_loss=sum", "learner.inner_lr=0.01", "outer.lr=0.001")
    first, second = (study.config(cell, {}, rates=shared) for cell in (base, control))
    assert run_id(first) == run_id(second)


def test_options_of_the_study_come_last_and_cells_can_be_chosen():
    study = tiny_study(options=("train.steps=7",), chosen=("maml-*",))
    assert [cell.name for cell in study.cells] == ["maml-emo-paper"]
    assert study.config(study.cells[0], {}).train.steps == 7
    assert not study.contrasts
    with pytest.raises(ConfigError, match="no cell like anil"):
        tiny_study(chosen=("anil",))


def test_a_preset_that_does_not_exist_makes_a_cell_unavailable_and_not_an_error():
    study = tiny_study(cells=(replace(tiny_study().cells[0], preset="nobody"),), contrasts=())
    assert study.available == ()
    assert study.cells[0].missing == "there is no preset 'nobody' yet"


@pytest.mark.parametrize("learner", ["arml", "hsml", "tsa-maml"])
def test_at_the_scale_of_the_paper_learners_have_their_published_sizes(learner):
    study = plan(entry_of("T7"), scale_of("paper", "images"), controls=False)
    full = complete(preset(f"{learner}-published"))
    cells = [cell for cell in study.available if parts_of(cell.preset)[0] == learner]
    assert len(cells) >= 4
    for cell in cells:
        found = complete(study.config(cell, {}))
        sizes = ("task_dim", "first_stage", "cluster_tasks")
        assert [found.learner.options.get(n) for n in sizes] == [
            full.learner.options.get(n) for n in sizes
        ]
        if learner == "tsa-maml":
            assert found.train.steps == full.train.steps
            assert found.outer.schedule == full.outer.schedule == "cosine"


def test_on_images_the_family_takes_the_rates_of_maml_and_is_tested_on_textures():
    study = plan(entry_of("T7"), scale_of("cpu", "images"), controls=False)
    choosing = {cell.name for cell in study.cells if cell.of is None}
    assert choosing == {"maml", "anil", "meta-sgd"}
    assert {study.chooser(cell).name for cell in study.cells} == choosing
    plain = [cell for cell in study.cells if not cell.name.endswith("in equal time")]
    assert {cell.tests for cell in plain} == {("outside textures",)}
    assert {study.config(cell, {}).train.steps for cell in plain} == {2500}
    points = plan(entry_of("T7"), scale_of("cpu", "regression"), controls=False)
    follow = {cell.name: cell.of for cell in points.cells if cell.of is not None}
    assert follow == {f"{name} longer": name for name in TRAINED_LONGER}
    pairs = {(c.cell, c.against) for c in points.contrasts}
    assert ("hsml longer", "maml longer") in pairs
    assert ("maml-offsets on surfaces longer", "maml on surfaces longer") in pairs


def test_on_images_offsets_take_the_rates_of_their_base_and_the_papers_memory_its_own():
    images, points = scale_of("cpu", "images"), scale_of("cpu", "regression")
    for entry in ("T1", "T2", "F2"):
        of = {cell.name: cell.of for cell in plan(entry_of(entry), images, controls=False).cells}
        assert of["maml-offsets"] == "maml"
        assert of["maml-emo-mixed"] is None
        of = {cell.name: cell.of for cell in plan(entry_of(entry), points, controls=False).cells}
        assert of["maml-offsets"] is None


@pytest.mark.parametrize("name", ["F3", "F7", "T4"])
@pytest.mark.parametrize("where", ["cpu/images", "cpu/regression", "paper/images"])
def test_sizes_and_controllers_take_the_rates_of_what_the_preset_has(name, where):
    study = plan(ENTRIES[name], SCALES[where], controls=False)
    for cell in study.cells:
        if cell.role == "base" or where.startswith("paper"):
            assert cell.of is None or cell.preset.endswith("-offsets-joint")
            continue
        shared = study.chooser(cell)
        usual = preset(cell.preset, regression=study.scale.regression)
        changes = {MIXED: MIXED_OPTIONS, REPAIRED: REPAIRED_OPTIONS}.get(cell.variant, ())
        usual = with_options(usual, changes)
        assert shared.name == "maml" or study.config(shared, {}).memory == reduced(usual).memory
        assert cell.world == "mixed"  # where T1 has the same runs


def test_three_variants_are_swept_and_speak_for_the_same_claim():
    study = plan(ENTRIES["F3"], SCALES["cpu/regression"], controls=False)
    drawn = study.contrasts
    assert [(c.cell, c.against, c.expect) for c in drawn] == [
        ("T=100 mixed", "maml", "better"),
        ("T=100 mixed", "T=20 mixed", "better"),
        ("T=500 mixed", "T=100 mixed", "no better"),
        ("T=100 repaired", "maml", "better"),
        ("T=100 repaired", "T=20 repaired", "better"),
        ("T=500 repaired", "T=100 repaired", "no better"),
        ("T=16 offsets", "maml", "better"),
        ("T=16 offsets", "T=2 offsets", "better"),
        ("T=32 offsets", "T=16 offsets", "no better"),
    ]
    assert {c.claims for c in drawn} == {("C4",)}
    assert [c.paper is None for c in drawn[::3]] == [False, True, True]  # the paper has one variant
    swept = [cell for cell in study.cells if cell.role == "memory"]
    for cell in swept:
        size = complete(study.config(cell, {})).memory.options["capacity"]
        assert size == int(cell.name.split(" ")[0][2:])


@pytest.mark.parametrize(
    ("name", "tasks"), [("R2", "images"), ("R2", "regression"), ("R3", "images")]
)
def test_fresh_seeds_take_the_rates_that_t1_chose(name, tasks):
    recorded = read_result(ROOT / "studies" / f"T1-cpu-{tasks}.json")["cells"]
    chosen = {cell["name"]: tuple(cell["rates"]) for cell in recorded}
    for cell in plan(ENTRIES[name], scale_of("cpu", tasks), controls=False).cells:
        assert cell.grid == (chosen[cell.name],)


def test_fresh_seeds_tune_nothing_and_share_neither_runs_nor_test_tasks_with_others(tmp_path):
    first, second, usual = (
        plan(ENTRIES[name], SCALES["cpu/images"], controls=False) for name in ("R2", "R3", "T1")
    )
    assert [len(study.seeds) for study in (first, second)] == [5, 5]
    assert len({*first.seeds, *second.seeds, *usual.seeds}) == 13
    for study in (first, second):
        assert [len(study.grid(cell)) for cell in study.cells] == [1] * 6
    cell = replace(first.cells[0], tests=())
    files = {
        StudyRun(study, tmp_path).runs_of(cell, study.grid(cell)[0]).files["mixed"]
        for study in (first, second, usual)
    }
    assert len(files) == 3


def test_one_step_is_tuned_alike_with_and_without_memory_on_seeds_of_its_own():
    for tasks in ("images", "regression"):
        study = plan(ENTRIES["R4"], scale_of("cpu", tasks), controls=False)
        cells = {cell.name: cell for cell in study.cells}
        for learner in ("maml", "anil", "meta-sgd"):
            whole, one, ours = (
                cells[f"{learner}{kind}"] for kind in ("", " in one step", "-offsets in one step")
            )
            assert (len(study.grid(whole)), whole.of, one.of, ours.of) == (1, None, None, None)
            assert study.grid(one) == study.grid(ours)
            assert len(study.grid(one)) > 3
            configs = [complete(study.config(cell, {})) for cell in (whole, one, ours)]
            steps = [config.learner.options["steps"] for config in configs]
            assert steps[1:] == [1, 1]
            assert steps[0] > 1
            assert configs[2].memory.options["capacity"] > 1
        others = [plan(ENTRIES[name], scale_of("cpu", tasks)) for name in ("T1", "R2")]
        assert not set(study.seeds) & {seed for other in others for seed in other.seeds}
        tests = {entry.test_seed for entry in ENTRIES.values() if entry.name not in ("R4", "R5")}
        assert study.entry.test_seed not in tests


def test_a_network_for_one_set_is_tested_on_the_tasks_that_the_mixed_one_is_tested_on():
    study = plan(ENTRIES["R5"], SCALES["cpu/images"], controls=False)
    cells = {cell.name: cell for cell in study.cells}
    alone = [c for c in study.contrasts if c.cell.startswith("anil on ")]
    assert [c.test for c in alone] == list(FOUR)
    for contrast in alone:
        assert cells[contrast.cell].world == contrast.test
        assert contrast.test in cells[contrast.against].tests
        assert len(study.grid(cells[contrast.cell])) == 4  # a ceiling is tuned where it stands
    longer, usual = (
        study.config(cells[name], {}).train for name in ("anil-offsets longer", "anil-offsets")
    )
    assert longer.steps == 4 * usual.steps


def test_ways_out_of_random_labels_are_tried_where_there_are_labels():
    where = {"aligned", "proto-maml", "proto-maml gates"}
    curves, images = (
        {c.name: c for c in plan(ENTRIES["R1"], SCALES[name], controls=False).cells}
        for name in ("cpu/regression", "cpu/images")
    )
    assert not where & set(curves)
    assert [images[name].of for name in sorted(where)] == ["maml"] * 3
    study = plan(ENTRIES["R1"], SCALES["cpu/images"], controls=False)
    chosen = {name: study.config(images[name], {}).memory for name in (*where, "gates")}
    assert chosen["aligned"] == chosen["gates"].set(head_align="hungarian")
    # Of its head nothing is remembered.
    assert chosen["proto-maml gates"].options["head_align"] == "drop"
    assert chosen["proto-maml"].name == "none"


@pytest.mark.parametrize(("where", "rates"), [("cpu/regression", "maml"), ("paper/images", None)])
def test_the_slow_transformer_takes_the_rates_of_its_learner_but_at_the_scale_of_the_paper(
    where, rates
):
    cells = {c.name: c for c in plan(ENTRIES["T3"], SCALES[where], controls=False).cells}
    assert cells["maml transformer"].of == rates
    assert (cells["maml mean"].of, cells["maml sum"].of) == (None, None)


def test_sets_beside_the_papers_take_the_rates_chosen_on_the_papers_where_a_grid_takes_hours():
    images = plan(ENTRIES["T1"], SCALES["cpu/images"], controls=False)
    cells = {cell.name: cell for cell in images.cells}
    for world in ("diverse", "omniglot"):
        for kind in ("", "-offsets"):
            assert images.chooser(cells[f"anil{kind} on {world}"]) == cells["anil"]
    curves = plan(ENTRIES["T1"], SCALES["cpu/regression"], controls=False)
    cells = {cell.name: cell for cell in curves.cells}
    assert curves.chooser(cells["anil on surfaces"]) == cells["anil on surfaces"]


def test_only_the_third_study_of_ours_lets_tasks_skip_recall_as_the_preset_does():
    shares = {
        name: {
            cell.name: study.config(cell, {}).memory.options.get("skip_unfamiliar")
            for cell in study.cells
            if cell.role == "memory"
        }
        for name in ("T1", "R2", "R3")
        for study in [plan(ENTRIES[name], SCALES["cpu/images"], controls=False)]
    }
    assert set(shares["T1"].values()) == set(shares["R2"].values()) == {None}
    assert set(shares["R3"].values()) == {preset("maml-offsets").memory.options["skip_unfamiliar"]}


def test_slots_that_pass_validation_are_set_against_the_learner_of_both_lengths():
    study = plan(ENTRIES["R6"], SCALES["cpu/images"], controls=False)
    cells = {cell.name: study.config(cell, {}) for cell in study.cells}
    ours, longer, shorter = (cells[name] for name in ("anil-offsets", "anil", "anil shorter"))
    assert ours.train.steps == longer.train.steps == 4 * shorter.train.steps
    memory, known = complete(ours).memory, preset("anil-offsets").memory
    assert memory.options["skip_unhelpful"] == 0.0
    assert memory.options["skip_unfamiliar"] == known.options["skip_unfamiliar"]
    assert (memory.options["tensors"], memory.name) == ("all", "offsets")
    drawn = {(c.against, c.test) for c in study.contrasts}
    tests = (None, "outside textures", "outside cifar100", "outside omniglot")
    assert drawn == {(base, test) for base in ("anil", "anil shorter") for test in tests}


@pytest.mark.parametrize("name", ["R6", "R7"])
def test_fresh_tests_share_no_seed_with_any_other_study(name):
    entry = ENTRIES[name]
    others = [other for other in ENTRIES.values() if other.name != name]
    assert entry.test_seed not in {other.test_seed for other in others}
    assert not set(entry.seeds) & {seed for other in others for seed in other.seeds or (0, 1, 2)}


def test_slots_that_train_after_the_learner_are_the_preset_and_others_train_together_with_it():
    study = plan(ENTRIES["R7"], SCALES["cpu/images"], controls=False)
    for cell in study.cells:
        if cell.role != "memory":
            continue
        learner, _ = parts_of(cell.preset)
        ours, known = study.config(cell, {}), preset(f"{learner}-offsets")
        assert known.memory.options["steps"] == "same"
        assert ours.memory_steps == ours.train.steps
        alike = ours.memory.set(slot_lr=3e-4, steps="same")
        assert alike == reduced(known).memory
        assert ours.train.validation_tasks == known.train.validation_tasks
    for name in ("T1", "R3", "R6"):
        study = plan(ENTRIES[name], SCALES["cpu/images"])
        assert all(study.config(c, {}).memory_steps is None for c in study.cells)


def test_slots_that_train_after_the_learner_leave_the_learner_as_it_is_without_memory():
    study = plan(ENTRIES["R7"], SCALES["cpu/images"])
    configs = {cell.name: study.config(cell, {}) for cell in study.cells}
    for learner in ("maml", "anil", "meta-sgd"):
        alone, ours = configs[learner], configs[f"{learner}-offsets"]
        turn = ours.train.steps
        assert (ours.learner, ours.outer) == (alone.learner, alone.outer)
        assert turn == alone.train.steps
        assert ours.outer_steps == 2 * turn
        assert configs[f"{learner}-offsets/no-memory"].train.steps == 2 * turn
        assert configs[f"{learner}-offsets/no-memory"].outer_steps == 2 * turn
        controls = [n for n in configs if n.startswith(f"{learner}-offsets/")]
        assert len(controls) == 4


def test_learners_of_one_set_take_the_rates_of_all_four_but_at_the_scale_of_the_paper():
    for where in ("cpu/images", "cpu/regression"):
        cells = plan(ENTRIES["F5"], SCALES[where], controls=False).cells
        for kind in ("", "-offsets", "-emo-mixed"):
            apart = [c for c in cells if c.name.startswith(f"maml{kind} on ") and c.world in FOUR]
            assert [c.of for c in apart] == [f"maml{kind}"] * 4
    whole = plan(ENTRIES["F5"], SCALES["paper/images"], controls=False)
    assert {cell.of for cell in whole.cells} == {None}
    assert {cell.world for cell in whole.cells} == set(FOUR)


@pytest.mark.parametrize("scale", SCALES)
def test_rates_are_taken_from_cells_that_are_run(scale):
    for entry in (e for e in ENTRIES.values() if scale in e.scales):
        study = plan(entry, SCALES[scale])
        assert {study.chooser(cell) for cell in study.available} <= set(study.available)


@pytest.mark.parametrize(
    ("preset", "rate"),
    [("maml", "inner_lr=0.003"), ("musml", "inner_lr=0.0003"), ("meta-sgd", "rate_init=")],
)
def test_a_learner_whose_rates_mean_something_else_has_a_grid_of_its_own(preset, rate):
    study = plan(entry_of("T7"), scale_of("cpu", "regression"), controls=False)
    cells = {cell.name: cell for cell in study.cells}
    grid = study.grid(cells[preset])
    assert grid == study.grid(cells[f"{preset}-offsets"])
    assert rate in grid[0][0]
    assert len(grid) == len(study.scale.grid)


def test_in_equal_time_every_method_has_as_many_cpu_seconds_as_maml():
    scale = scale_of("cpu", "images")
    study = plan(entry_of("T7"), scale, controls=False)
    cells = [cell for cell in study.cells if cell.name.endswith("in equal time")]
    methods = {cell.name.removesuffix(" in equal time"): cell for cell in cells}
    assert methods.keys() == scale.costs.keys() - {"maml"}
    for method, cell in methods.items():
        found = study.config(cell, {}).train.steps * scale.costs[method]
        assert found == pytest.approx(2500, rel=0.005)
    pairs = {(c.cell, c.against) for c in study.contrasts}
    assert ("anil-offsets in equal time", "anil in equal time") in pairs
    assert ("arml in equal time", "maml") in pairs


def test_wrong_names_are_refused_with_a_suggestion():
    assert entry_of("t1").name == "T1"
    with pytest.raises(ConfigError, match="Did you mean 'T1'"):
        entry_of("T11")
    with pytest.raises(ConfigError, match="no scale 'paper' for regression"):
        scale_of("paper", "regression")
