"""Plans: every entry resolves at every scale, runs are named by what decides them, controls are complete."""

import hashlib
from dataclasses import replace

import pytest
import tomli_w

from tests.lab.study.conftest import TINY, tiny_study
from tests.lab.study.test_command import ROOT
from torchemo.config.presets import preset
from torchemo.config.run import RunConfig
from torchemo.config.toml import dumps, from_dict, override, to_dict
from torchemo.core.errors import ConfigError
from torchemo.lab.study.catalogue import ENTRIES, entry_of
from torchemo.lab.study.controls import CONTROLS, control_options
from torchemo.lab.study.entry import MENDED
from torchemo.lab.study.paper.cells import MENDED_OPTIONS
from torchemo.lab.study.paper.t7_to_t9 import TRAINED_LONGER
from torchemo.lab.study.plan import LATER, minutes, plan, run_id, run_names
from torchemo.lab.study.records import read_result
from torchemo.lab.study.run import StudyRun
from torchemo.lab.study.scales import FOUR, SCALES, SEEN, scale_of


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
        study = plan(ENTRIES["T1"], SCALES["cpu/pictures"], **options)
        return {cell.name.split("/")[0] for cell in study.cells if cell.role == "control"}

    assert controlled() > {"maml-emo", "anil-emo", "meta-sgd-emo"}
    some = controlled(controlled_cells=("maml-emo", "anil-emo-p*"))
    assert some == {"maml-emo", "anil-emo-paper"}
    with pytest.raises(ConfigError, match="a name like maml"):
        controlled(controlled_cells=("maml",))
    assert not controlled(controlled_cells=("maml-emo",), controls=False)


def test_controls_may_be_of_some_kinds_alone():
    named = ("*-emo/one-slot", "anil-emo-paper/no-memory")
    study = plan(ENTRIES["T1"], SCALES["cpu/regression"], chosen=("anil*",), controlled_cells=named)
    found = {cell.name for cell in study.cells if cell.role == "control"}
    assert {"anil-emo/one-slot", "anil-emo-paper/no-memory"} <= found
    assert all(name.endswith("/one-slot") for name in found - {"anil-emo-paper/no-memory"})
    drawn = {c.against for c in study.contrasts}
    assert "anil-emo/one-slot" in drawn
    assert "anil-emo/no-memory" not in drawn


@pytest.mark.parametrize(("name", "where"), PLACES)
def test_every_cell_resolves_and_every_contrast_speaks_of_cells_that_exist(name, where):
    study = plan(ENTRIES[name], SCALES[where])
    names = [cell.name for cell in study.cells]
    assert len(set(names)) == len(names)
    everything = {cell.name for cell in ENTRIES[name].cells(SCALES[where])}
    for contrast in ENTRIES[name].contrasts(SCALES[where]):
        assert {contrast.cell, contrast.against} <= everything
    for cell in study.available:
        assert {*cell.tests, cell.world} - {SEEN} <= set(SCALES[where].worlds)
        for rates in study.grid(cell):
            assert isinstance(study.config(cell, {}, rates=rates, seed=3), RunConfig)
    if where.startswith("cpu"):
        assert 0 < minutes(study) < 24 * 60


@pytest.mark.parametrize("name", [n for n, one in ENTRIES.items() if one.measure == "score"])
def test_every_cell_with_memory_is_set_against_all_of_its_controls(name):
    study = plan(ENTRIES[name], SCALES[ENTRIES[name].scales[0]])
    drawn = {(c.cell, c.against) for c in study.contrasts}
    for cell in study.available:
        if cell.role != "emo":
            continue
        wanted = {"no-memory", "random-retrieval", "random-gradients"}
        if study.config(cell, {}).emo.memory.write == "consolidate":
            wanted.add("one-slot")
        assert {(cell.name, f"{cell.name}/{control}") for control in wanted} <= drawn


def test_controls_are_also_set_against_the_learner_without_memory():
    study = plan(ENTRIES["T1"], SCALES["cpu/pictures"], chosen=("maml", "maml-emo", "maml longer"))
    drawn = [(c.cell, c.against, c.expect) for c in study.contrasts if c.against == "maml"]
    assert ("maml-emo/one-slot", "maml", "shown") in drawn
    assert ("maml-emo/random-gradients", "maml", "shown") in drawn
    assert not [pair for pair in drawn if pair[0] == "maml-emo/no-memory"]  # they are the same runs


def test_a_control_changes_one_thing_and_takes_the_rates_of_its_cell():
    study = tiny_study(controls=True)
    control = next(c for c in study.cells if c.name == "maml-emo-paper/random-gradients")
    own = study.config(study.cells[1], {}, rates=TINY.grid[1])
    broken = study.config(control, {}, rates=TINY.grid[1])
    mended = replace(broken.emo, value=replace(broken.emo.value, control="none"))
    assert broken != own
    assert replace(broken, emo=mended) == own
    assert control.of == "maml-emo-paper"
    assert study.chooser(control) == study.cells[1]


def test_readings_that_change_ours_take_its_rates_and_so_do_their_controls():
    study = plan(entry_of("R1"), scale_of("cpu", "pictures"), chosen=("scales and shifts",))
    names = [cell.name for cell in study.cells]
    assert names[:3] == ["maml", "ours", "scales and shifts"]
    assert "scales and shifts/one-slot" in names
    assert {study.chooser(cell).name for cell in study.cells} == {"maml"}


def test_controls_know_what_a_consolidated_memory_needs():
    literal, ours = preset("maml-emo-paper"), preset("maml-emo")
    assert control_options("one-slot", literal) is None
    assert control_options("one-slot", ours) == ("emo.memory.capacity=1",)
    assert "emo.retrieval.k=1" in (control_options("random-retrieval", ours) or ())
    assert control_options("random-retrieval", literal) == ("emo.retrieval.index=random",)
    assert all(control_options(name, ours) for name in CONTROLS)


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


def test_options_that_came_later_part_no_run_from_its_record():
    config = preset("maml-emo", regression=True)
    plain = to_dict(config)
    del plain["emo"]["retrieval"]["trust"], plain["emo"]["memory"]["afterwards"]

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    assert run_id(config) == run_names(config)[0] == digest(tomli_w.dumps(plain))
    assert run_names(config)[-1] == digest(dumps(config))
    assert len(set(run_names(config))) == 1 + len(LATER)
    other = with_options(config, ("emo.memory.afterwards=0.5",))
    assert not set(run_names(config)) & set(run_names(other))


def test_without_slots_nothing_else_about_a_memory_matters_and_the_run_is_shared():
    study = tiny_study(controls=True)
    base, control = study.cells[0], study.cells[2]
    assert control.name == "maml-emo-paper/no-memory"
    shared = ("outer.clip=1.0", "learner.inner_lr=0.01", "outer.lr=0.001")
    first, second = (study.config(cell, {}, rates=shared) for cell in (base, control))
    assert run_id(first) == run_id(second)


def test_options_of_the_study_come_last_and_cells_can_be_chosen():
    study = tiny_study(options=("train.iterations=7",), chosen=("maml-*",))
    assert [cell.name for cell in study.cells] == ["maml-emo-paper"]
    assert study.config(study.cells[0], {}).train.iterations == 7
    assert not study.contrasts
    with pytest.raises(ConfigError, match="no cell like anil"):
        tiny_study(chosen=("anil",))


def test_a_preset_that_does_not_exist_makes_a_cell_unavailable_and_not_an_error():
    study = tiny_study(cells=(replace(tiny_study().cells[0], preset="nobody"),), contrasts=())
    assert study.available == ()
    assert study.cells[0].missing == "there is no preset 'nobody' yet"


@pytest.mark.parametrize("learner", ["arml", "hsml", "tsa-maml"])
def test_at_the_scale_of_the_paper_learners_have_their_published_sizes(learner):
    study = plan(entry_of("T7"), scale_of("paper", "pictures"), controls=False)
    full = preset(f"{learner}-published")
    for cell in study.available:
        if cell.preset.removesuffix("-paper").removesuffix("-emo") == learner:
            found = study.config(cell, {})
            sizes = ("task_dim", "first_stage", "cluster_tasks")
            assert [getattr(found.learner, n) for n in sizes] == [
                getattr(full.learner, n) for n in sizes
            ]
            if learner == "tsa-maml":
                assert found.train.iterations == full.train.iterations
                assert found.outer.schedule == full.outer.schedule == "cosine"


def test_on_pictures_the_family_takes_the_rates_of_maml_and_is_tested_on_textures():
    study = plan(entry_of("T7"), scale_of("cpu", "pictures"), controls=False)
    choosing = {cell.name for cell in study.cells if cell.of is None}
    assert choosing == {"maml", "anil", "meta-sgd"}
    assert {study.chooser(cell).name for cell in study.cells} == choosing
    plain = [cell for cell in study.cells if not cell.name.endswith("in equal time")]
    assert {cell.tests for cell in plain} == {("outside textures",)}
    assert {study.config(cell, {}).train.iterations for cell in plain} == {2500}
    points = plan(entry_of("T7"), scale_of("cpu", "regression"), controls=False)
    follow = {cell.name: cell.of for cell in points.cells if cell.of is not None}
    assert follow == {f"{name} longer": name for name in TRAINED_LONGER}
    pairs = {(c.cell, c.against) for c in points.contrasts}
    assert ("hsml longer", "maml longer") in pairs
    assert ("maml-emo on surfaces longer", "maml on surfaces longer") in pairs


def test_on_pictures_our_memory_takes_the_rates_of_its_base_and_the_literal_one_its_own():
    pictures, points = scale_of("cpu", "pictures"), scale_of("cpu", "regression")
    for entry in ("T1", "T2", "F2"):
        of = {cell.name: cell.of for cell in plan(entry_of(entry), pictures, controls=False).cells}
        assert of["maml-emo"] == "maml"
        assert of["maml-emo-paper"] is None
        of = {cell.name: cell.of for cell in plan(entry_of(entry), points, controls=False).cells}
        assert of["maml-emo"] is None


@pytest.mark.parametrize("name", ["F3", "F7", "T4"])
@pytest.mark.parametrize("where", ["cpu/pictures", "cpu/regression", "paper/pictures"])
def test_sizes_and_controllers_take_the_rates_of_what_the_preset_has(name, where):
    study = plan(ENTRIES[name], SCALES[where], controls=False)
    for cell in study.cells:
        if cell.role == "base" or where.startswith("paper"):
            assert cell.of is None or cell.preset.endswith("-emo")
            continue
        shared = study.chooser(cell)
        usual = preset(cell.preset, regression=study.scale.regression)
        if cell.reading == MENDED:
            usual = with_options(usual, MENDED_OPTIONS)
        assert shared.name == "maml" or study.config(shared, {}).emo == usual.emo
        assert cell.world == "mixed"  # where T1 has the same runs


def test_three_readings_are_swept_and_speak_for_the_same_claim():
    study = plan(ENTRIES["F3"], SCALES["cpu/regression"], controls=False)
    drawn = study.contrasts
    assert [(c.cell, c.against, c.expect) for c in drawn] == [
        ("T=100", "maml", "better"),
        ("T=100", "T=20", "better"),
        ("T=500", "T=100", "no better"),
        ("T=100 mended", "maml", "better"),
        ("T=100 mended", "T=20 mended", "better"),
        ("T=500 mended", "T=100 mended", "no better"),
        ("T=16 ours", "maml", "better"),
        ("T=16 ours", "T=2 ours", "better"),
        ("T=32 ours", "T=16 ours", "no better"),
    ]
    assert {c.claims for c in drawn} == {("C4",)}
    assert [c.paper is None for c in drawn[::3]] == [False, True, True]  # the paper has one reading
    swept = [cell for cell in study.cells if cell.role == "emo"]
    for cell in swept:
        assert study.config(cell, {}).emo.memory.capacity == int(cell.name.split(" ")[0][2:])


@pytest.mark.parametrize(
    ("name", "tasks"), [("R2", "pictures"), ("R2", "regression"), ("R3", "pictures")]
)
def test_fresh_seeds_take_the_rates_that_t1_chose(name, tasks):
    recorded = read_result(ROOT / "studies" / f"T1-cpu-{tasks}.json")["cells"]
    chosen = {cell["name"]: tuple(cell["rates"]) for cell in recorded}
    for cell in plan(ENTRIES[name], scale_of("cpu", tasks), controls=False).cells:
        assert cell.grid == (chosen[cell.name],)


def test_fresh_seeds_tune_nothing_and_share_neither_runs_nor_test_tasks_with_others(tmp_path):
    first, second, usual = (
        plan(ENTRIES[name], SCALES["cpu/pictures"], controls=False) for name in ("R2", "R3", "T1")
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
    for tasks in ("pictures", "regression"):
        study = plan(ENTRIES["R4"], scale_of("cpu", tasks), controls=False)
        cells = {cell.name: cell for cell in study.cells}
        for learner in ("maml", "anil", "meta-sgd"):
            whole, one, ours = (
                cells[f"{learner}{kind}"] for kind in ("", " in one step", "-emo in one step")
            )
            assert (len(study.grid(whole)), whole.of, one.of, ours.of) == (1, None, None, None)
            assert study.grid(one) == study.grid(ours)
            assert len(study.grid(one)) > 3
            assert [study.config(cell, {}).learner.steps for cell in (one, ours)] == [1, 1]
            assert study.config(whole, {}).learner.steps > 1
            assert study.config(ours, {}).emo.memory.capacity > 1
        others = [plan(ENTRIES[name], scale_of("cpu", tasks)) for name in ("T1", "R2")]
        assert not set(study.seeds) & {seed for other in others for seed in other.seeds}
        tests = {entry.test_seed for entry in ENTRIES.values() if entry.name not in ("R4", "R5")}
        assert study.entry.test_seed not in tests


def test_a_network_for_one_set_is_tested_on_the_tasks_that_the_mixed_one_is_tested_on():
    study = plan(ENTRIES["R5"], SCALES["cpu/pictures"], controls=False)
    cells = {cell.name: cell for cell in study.cells}
    alone = [c for c in study.contrasts if c.cell.startswith("anil on ")]
    assert [c.test for c in alone] == list(FOUR)
    for contrast in alone:
        assert cells[contrast.cell].world == contrast.test
        assert contrast.test in cells[contrast.against].tests
        assert len(study.grid(cells[contrast.cell])) == 4  # a ceiling is tuned where it stands
    longer, usual = (
        study.config(cells[name], {}).train for name in ("anil-emo longer", "anil-emo")
    )
    assert longer.iterations == 4 * usual.iterations


def test_ways_out_of_random_labels_are_tried_where_there_are_labels():
    where = {"aligned", "proto-maml", "proto-maml gates"}
    curves, pictures = (
        {c.name: c for c in plan(ENTRIES["R1"], SCALES[name], controls=False).cells}
        for name in ("cpu/regression", "cpu/pictures")
    )
    assert not where & set(curves)
    assert [pictures[name].of for name in sorted(where)] == ["maml"] * 3
    study = plan(ENTRIES["R1"], SCALES["cpu/pictures"], controls=False)
    chosen = {name: study.config(pictures[name], {}).emo for name in (*where, "gates")}
    same = replace(chosen["gates"].value, head_align="hungarian")
    assert chosen["aligned"] == replace(chosen["gates"], value=same)
    assert (
        chosen["proto-maml gates"].value.head_align == "drop"
    )  # of its head nothing is remembered
    assert chosen["proto-maml"].memory.capacity == 0


@pytest.mark.parametrize(("where", "rates"), [("cpu/regression", "maml"), ("paper/pictures", None)])
def test_the_slow_transformer_takes_the_rates_of_its_learner_but_at_the_scale_of_the_paper(
    where, rates
):
    cells = {c.name: c for c in plan(ENTRIES["T3"], SCALES[where], controls=False).cells}
    assert cells["maml transformer"].of == rates
    assert (cells["maml mean"].of, cells["maml sum"].of) == (None, None)


def test_sets_beside_the_papers_take_the_rates_chosen_on_the_papers_where_a_grid_takes_hours():
    pictures = plan(ENTRIES["T1"], SCALES["cpu/pictures"], controls=False)
    cells = {cell.name: cell for cell in pictures.cells}
    for world in ("diverse", "omniglot"):
        for kind in ("", "-emo"):
            assert pictures.chooser(cells[f"anil{kind} on {world}"]) == cells["anil"]
    curves = plan(ENTRIES["T1"], SCALES["cpu/regression"], controls=False)
    cells = {cell.name: cell for cell in curves.cells}
    assert curves.chooser(cells["anil on surfaces"]) == cells["anil on surfaces"]


def test_only_the_third_study_of_ours_lets_the_memory_keep_silent_as_the_preset_does():
    shares = {
        name: {
            cell.name: study.config(cell, {}).emo.retrieval.familiar
            for cell in study.cells
            if cell.role == "emo"
        }
        for name in ("T1", "R2", "R3")
        for study in [plan(ENTRIES[name], SCALES["cpu/pictures"], controls=False)]
    }
    assert set(shares["T1"].values()) == set(shares["R2"].values()) == {None}
    assert set(shares["R3"].values()) == {preset("maml-emo").emo.retrieval.familiar}


def test_slots_that_earn_their_trust_are_set_against_the_learner_of_both_lengths():
    study = plan(ENTRIES["R6"], SCALES["cpu/pictures"], controls=False)
    cells = {cell.name: study.config(cell, {}) for cell in study.cells}
    ours, longer, shorter = (cells[name] for name in ("anil-emo", "anil", "anil shorter"))
    assert ours.train.iterations == longer.train.iterations == 4 * shorter.train.iterations
    assert ours.emo.retrieval.trust == 0.0
    assert ours.emo.retrieval.familiar == preset("anil-emo").emo.retrieval.familiar
    assert (ours.emo.value.tensors, ours.emo.memory.write) == ("all", "consolidate")
    drawn = {(c.against, c.test) for c in study.contrasts}
    tests = (None, "outside textures", "outside cifar100", "outside omniglot")
    assert drawn == {(base, test) for base in ("anil", "anil shorter") for test in tests}


@pytest.mark.parametrize("name", ["R6", "R7"])
def test_fresh_tests_share_no_seed_with_any_other_study(name):
    entry = ENTRIES[name]
    others = [other for other in ENTRIES.values() if other.name != name]
    assert entry.test_seed not in {other.test_seed for other in others}
    assert not set(entry.seeds) & {seed for other in others for seed in other.seeds or (0, 1, 2)}


def test_slots_that_learn_afterwards_are_the_preset_and_others_at_once():
    study = plan(ENTRIES["R7"], SCALES["cpu/pictures"], controls=False)
    for cell in study.cells:
        if cell.role != "emo":
            continue
        ours, known = study.config(cell, {}), preset(cell.preset)
        assert replace(ours.emo, memory=replace(ours.emo.memory, slot_lr=3e-4)) == known.emo
        assert ours.train.validation_tasks == known.train.validation_tasks
    for name in ("T1", "R3", "R6"):
        study = plan(ENTRIES[name], SCALES["cpu/pictures"])
        assert all(study.config(c, {}).emo.memory.afterwards is None for c in study.cells)


def test_slots_that_learn_afterwards_leave_the_learner_as_it_is_without_memory():
    study = plan(ENTRIES["R7"], SCALES["cpu/pictures"])
    configs = {cell.name: study.config(cell, {}) for cell in study.cells}
    for learner in ("maml", "anil", "meta-sgd"):
        alone, ours = configs[learner], configs[f"{learner}-emo"]
        turn = ours.emo.memory.afterwards * ours.train.iterations
        assert (ours.learner, ours.outer) == (alone.learner, alone.outer)
        assert turn == alone.train.iterations
        assert configs[f"{learner}-emo/no-memory"].train.iterations == 2 * turn
        controls = [n for n in configs if n.startswith(f"{learner}-emo/")]
        assert len(controls) == 4


def test_learners_of_one_set_take_the_rates_of_all_four_but_at_the_scale_of_the_paper():
    for where in ("cpu/pictures", "cpu/regression"):
        cells = plan(ENTRIES["F5"], SCALES[where], controls=False).cells
        for kind in ("", "-emo", "-emo-paper"):
            apart = [c for c in cells if c.preset == f"maml{kind}" and c.world in FOUR]
            assert [c.of for c in apart] == [f"maml{kind}"] * 4
    whole = plan(ENTRIES["F5"], SCALES["paper/pictures"], controls=False)
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
    assert grid == study.grid(cells[f"{preset}-emo"])
    assert rate in grid[0][0]
    assert len(grid) == len(study.scale.grid)


def test_in_equal_time_every_method_has_as_many_cpu_seconds_as_maml():
    scale = scale_of("cpu", "pictures")
    study = plan(entry_of("T7"), scale, controls=False)
    cells = [cell for cell in study.cells if cell.name.endswith("in equal time")]
    assert {cell.preset for cell in cells} == scale.costs.keys() - {"maml"}
    for cell in cells:
        found = study.config(cell, {}).train.iterations * scale.costs[cell.preset]
        assert found == pytest.approx(2500, rel=0.005)
    pairs = {(c.cell, c.against) for c in study.contrasts}
    assert ("anil-emo in equal time", "anil in equal time") in pairs
    assert ("arml in equal time", "maml") in pairs


def test_wrong_names_are_refused_with_a_suggestion():
    assert entry_of("t1").name == "T1"
    with pytest.raises(ConfigError, match="Did you mean 'T1'"):
        entry_of("T11")
    with pytest.raises(ConfigError, match="no scale 'paper' for regression"):
        scale_of("paper", "regression")
