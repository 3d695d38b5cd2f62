"""Parts of the report against oracles: smoothing, the plane of keys, probes, samples, SVG, numbers."""

import base64
import io
import re
import statistics
import warnings
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from tests.report.html import broken_laws
from torchemo.config.registry import Part
from torchemo.config.run import RunConfig
from torchemo.core.rng import generator_for
from torchemo.core.types import TaskShape
from torchemo.learners.build import build_learner
from torchemo.memory.inspection.slots import principal_map
from torchemo.memory.selective import SkipUnfamiliar, SkipUnhelpful
from torchemo.models import build_model
from torchemo.report.figures import Interval, Line, forest, lines, smooth
from torchemo.report.format import method_of, number
from torchemo.report.run.collect import Curve, best_validation, collect, curve
from torchemo.report.run.images import picture_uri
from torchemo.report.run.memory import view_memory
from torchemo.report.run.probe import PROBES, probe
from torchemo.report.run.samples import PictureSample, PointSample, sample_tasks
from torchemo.runs.load import load_best, read_config
from torchemo.runs.score import memory_digest
from torchemo.runs.storage import checkpoint, history
from torchemo.runs.train import VALIDATION_SEED
from torchemo.training.evaluate import batches, evaluate


def line(label="a"):
    return Line(label, [0, 1, 2], [1.0, 2.0, 1.5], [0.5, 1.0, 1.0], [1.5, 3.0, 2.0])


def one(label="a", **options):
    return str(lines([line(label), line("b")], name="n", alt="what", x="x", y="y", **options))


def test_smoothing_gives_medians_of_equal_windows_and_forgets_no_value():
    values = [float((7 * i) % 13) for i in range(130)]
    found = smooth(Curve(list(range(1, 131)), values))
    windows = [values[i : i + 3] for i in range(0, 130, 3)]  # 130 values, at most 60 windows
    assert found.y == [statistics.median(window) for window in windows]
    assert found.x[0] == 2.0
    assert found.x[-1] == 130.0
    assert all(
        low <= y <= high for low, y, high in zip(found.low, found.y, found.high, strict=True)
    )
    assert smooth(Curve([1, 2], [3.0, 4.0])).y == [3.0, 4.0]


def test_a_probe_reads_the_memory_as_evaluation_does_and_changes_nothing(points):
    opened = load_best(points)
    memory = opened.system.memory
    before = memory_digest(memory)
    found = probe(opened)
    assert memory_digest(memory) == before
    assert found.keys.shape == (PROBES, 8)
    assert found.weights.shape == (PROBES, 5)
    assert torch.allclose(found.weights.sum(1), torch.ones(PROBES), atol=1e-6)
    assert torch.equal((found.weights > 0).sum(1), torch.full((PROBES,), 3))  # k = 3
    nearest = torch.cdist(found.keys, memory.store.keys).argsort(1)[:, :3]
    for weights, slots in zip(found.weights, nearest.tolist(), strict=True):
        assert set(weights.nonzero().flatten().tolist()) == set(slots)


def test_the_table_of_slots_is_what_the_checkpoint_says(points):
    opened = load_best(points)
    found = view_memory(opened.system.memory, probe(opened), opened.source.domains)
    step = opened.system.iteration
    saved = checkpoint.load(checkpoint.step_folder(points, step)).groups["memory"]
    state = {name.split("store.")[-1]: tensor for name, tensor in saved.items()}
    names = opened.source.domains
    assert [slot.recalls for slot in found.slots] == sorted(
        state["ledger.recalls"].tolist(), reverse=True
    )
    for slot in found.slots:
        assert slot.recalls == state["ledger.recalls"][slot.number]
        assert slot.generation == state["ledger.generation"][slot.number]
        assert slot.age == state["ledger.iteration"] - state["ledger.born"][slot.number]
        assert slot.domain == names[int(state["notes.domain"][slot.number])]
    assert found.writes == 2 * step  # two tasks per outer step, each written once
    assert found.overwrites == 2 * step - 5


def test_slots_lie_on_the_map_in_the_order_of_their_table_among_the_tasks_that_were_probed(points):
    opened = load_best(points)
    memory, seen = opened.system.memory, probe(opened)
    found = view_memory(memory, seen, opened.source.domains)
    slots = memory.store.keys[[slot.number for slot in found.slots]]
    places, explained = principal_map(torch.cat([slots, seen.keys]).double())
    assert torch.equal(found.key_map.slots, places[: len(slots)])
    assert torch.equal(found.key_map.tasks, places[len(slots) :])
    assert found.key_map.explained == explained


def test_a_slot_is_recalled_most_by_the_domain_with_the_largest_mean_weight(pictures):
    opened = load_best(pictures)
    seen = probe(opened)
    found = view_memory(opened.system.memory, seen, opened.source.domains)
    for slot in found.slots:
        means = {}
        for d, name in enumerate(opened.source.domains):
            rows = [
                float(w[slot.number])
                for w, k in zip(seen.weights, seen.domain, strict=True)
                if k == d
            ]
            means[name] = sum(rows) / len(rows)
        assert slot.recalled_by == max(means, key=means.get)
        assert slot.share == pytest.approx(max(means.values()) / sum(means.values()))
        assert slot.domain is None  # slots of offsets belong to no single task


def test_tasks_that_skip_recall_are_counted(pictures):
    opened = load_best(pictures)
    memory, domains = opened.system.memory, opened.source.domains
    seen = probe(opened)
    assert view_memory(memory, seen, domains).skipped == 0
    dim = memory.store.key_dim
    memory.skip_unfamiliar = SkipUnfamiliar(dim, share=0.9)
    elsewhere = seen.keys[:1].expand(4 * dim, -1) + 100.0
    memory.skip_unfamiliar.see(elsewhere + torch.randn(elsewhere.shape, generator=generator_for(0)))
    assert view_memory(memory, probe(opened), domains).skipped == PROBES
    memory.skip_unfamiliar.allows = lambda recall: torch.arange(len(recall.keys)) % 4 > 0
    assert view_memory(memory, probe(opened), domains).skipped == PROBES // 4


def test_slots_that_failed_validation_are_named(pictures):
    opened = load_best(pictures)
    memory, domains = opened.system.memory, opened.source.domains
    memory.skip_unfamiliar = None
    memory.skip_unhelpful = SkipUnhelpful(memory.store.capacity)
    assert view_memory(memory, probe(opened), domains).failed == ()
    memory.skip_unhelpful.failed.fill_(True)
    view = view_memory(memory, probe(opened), domains)
    assert (view.skipped, view.failed) == (PROBES, tuple(range(memory.store.capacity)))


@pytest.mark.parametrize("run", ["points", "pictures"])
def test_sample_tasks_score_what_validation_scores(run, request):
    opened = load_best(request.getfixturevalue(run))
    system, source = opened.system, opened.source
    found = sample_tasks(opened, None)
    assert [task.domain for task in found] == list(source.domains)
    tasks = max(task.number for task in found) + 1
    scores = evaluate(
        system.learner,
        system.params,
        batches(
            lambda start, count: source.sample(
                "val", seed=VALIDATION_SEED, start=start, count=count
            ),
            tasks=tasks,
        ),
        memory=system.memory,
        batched=system.batched,
    )
    scored = scores.loss[[task.number for task in found]]
    assert not torch.allclose(scored[:, 0], scored[:, -1], rtol=0.05)  # adaptation changes answers
    for task in found:
        assert source.domains[int(scores.domain[task.number])] == task.domain
        if isinstance(task, PictureSample):
            right = [count / task.queries for count in task.right]
            assert right == pytest.approx(scores.accuracy[task.number].tolist())
            shown = sum(picture.answer == picture.label for picture in task.query)
            assert len(task.query) == task.queries  # few enough to show them all
            assert shown == task.right[-1]
        else:
            assert isinstance(task, PointSample)
            assert task.errors == pytest.approx(scores.loss[task.number].tolist(), rel=1e-4)


def test_the_curve_of_a_point_task_goes_through_its_answers(points):
    for task in sample_tasks(load_best(points), None):
        for curve_, answers in zip(task.curves, task.answers, strict=True):
            between = np.interp(task.query.x[:, 0], task.grid.numpy(), curve_.numpy())
            assert between == pytest.approx(answers.numpy(), abs=0.05 * float(curve_.abs().max()))


def test_pictures_are_shown_pixel_by_pixel_and_large_ones_are_shrunk():
    pixels = torch.randint(0, 256, (3, 16, 16), generator=torch.Generator().manual_seed(0))
    uri = picture_uri(pixels / 255)
    head, data = uri.split(",")
    assert head == "data:image/png;base64"
    shown = np.array(Image.open(io.BytesIO(base64.b64decode(data))))
    assert np.array_equal(shown, pixels.permute(1, 2, 0).numpy())
    grey = base64.b64decode(picture_uri(torch.rand(1, 200, 100)).split(",")[1])
    assert Image.open(io.BytesIO(grey)).size == (24, 48)


@pytest.mark.parametrize(
    "label", ["$x^{$ $", "<script>alert(1)</script>", '" id="x', "#23272e", "鳥", "a" * 99]
)
def test_any_name_can_stand_in_a_figure_without_a_warning_or_markup(label):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = one(label)
    assert broken_laws(text) == []
    words = "".join(ElementTree.fromstring(text).itertext())
    assert label[:20] in words


def test_figures_take_their_colours_from_the_page_and_repeat_to_the_byte():
    text = one()
    assert text == one()
    assert "var(--ink)" in text
    assert "var(--s0)" in text
    assert set(re.findall(r"#[0-9a-f]{6}\b", text)) <= {"#000000"}
    assert "font-family" not in text


def test_two_figures_of_a_page_share_no_ids():
    ids = [
        set(re.findall(r' id="([^"]+)"', str(lines([line()], name=name, alt="a", x="x", y="y"))))
        for name in ("first", "second")
    ]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_open_intervals_and_bands_below_zero_are_drawn():
    rows = [Interval("all", 1.0, None, None, strong=True), Interval("b", 2.0, 1.0, 3.0)]
    text = str(forest(rows, name="f", alt="a", x="x", zero=True, sides=("left", "right")))
    assert "← left" in text
    assert "right →" in text
    band = Line("", [0, 1], [100.0, 1.0], [-5.0, -1.0], [1e6, 3.0])
    assert "nan" not in str(lines([band], name="l", alt="a", x="x", y="y", log=True))


def test_one_huge_interval_does_not_hide_the_others():
    rows = [Interval("a", -0.7, -1.0, -0.4), Interval("b", 0.5, 0.4, 0.6)]
    plain = str(forest(rows, name="f", alt="a", x="difference", zero=True))
    assert "log beyond" not in plain
    rows.append(Interval("huge", 300.0, -900.0, 1500.0))
    scaled = str(forest(rows, name="f", alt="a", x="difference", zero=True))
    assert "log beyond ±0.7" in scaled
    assert "math" not in scaled  # ticks are plain numbers
    rows[-1] = Interval("large", 30.0, -40.0, 70.0)
    large = str(forest(rows, name="f", alt="a", x="difference", zero=True))
    assert {"-10", "-1", "0", "1", "10"} <= set(re.findall(r">([-\d]+)<", large))


def test_numbers_that_are_not_finite_are_left_out_of_curves():
    events = [
        {"event": "step", "step": 1, "loss": 2.0},
        {"event": "step", "step": 2, "loss": "NaN"},
        {"event": "validation", "step": 2, "loss": 9.0, "score": -3},
        {"event": "step", "step": 3, "loss": None},
        {"event": "step", "step": 4},
        {"event": "validation", "step": 4, "score": -2.0},
        {"event": "validation", "step": 6, "score": -2.0},
    ]
    assert curve(events, "step", "loss") == Curve([1], [2.0])
    assert best_validation(events) == (4, -2.0)
    assert best_validation(events[:2]) is None


def test_the_best_validation_is_the_one_the_run_chose(points):
    saved = checkpoint.load(history.latest(points).path).info["progress"]
    best = best_validation(collect(points).events)
    assert best == (saved["best_step"], saved["best_score"])
    assert read_config(points) == collect(points).config


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (12345.6, "12,346"), (123.45, "123.5"), (-1.005, "−1.00"), (0.5, "0.500"),
     (0.0123, "0.0123"), (1.5e-5, "1.50e-05"), (-0.0, "0")],
)  # fmt: skip
def test_numbers_have_three_or_four_digits(value, text):
    assert number(value) == text
    if value > 0:
        assert number(value, sign=True) == f"+{text}"


TITLES = {
    "maml": "MAML",
    "fomaml": "FOMAML",
    "anil": "ANIL",
    "boil": "BOIL",
    "meta-sgd": "Meta-SGD",
    "reptile": "Reptile",
    "proto-maml": "Proto-MAML",
    "maml++": "MAML++",
    "arml": "ARML",
    "hsml": "HSML",
    "tsa-maml": "TSA-MAML",
    "musml": "MUSML",
    "bmg": "BMG",
    "protonet": "ProtoNet",
}


@pytest.mark.parametrize("name", TITLES)
def test_a_method_is_named_as_the_learner_that_it_builds(name):
    part = Part(name)
    shape = TaskShape("classification", (3, 16, 16), n_out=2, n_shot=1, n_query=2)
    learner = build_learner(part, build_model(Part("conv4", {"filters": 2}), shape), shape)
    assert method_of(RunConfig(learner=part)) == learner.title == TITLES[name]
    for memory, title in (("gradients", "EMO"), ("offsets", "offsets")):
        config = RunConfig(learner=part, memory=Part(memory))
        assert method_of(config) == f"{TITLES[name]} + {title}"


def test_a_method_without_slots_has_no_memory_and_a_learner_over_another_names_both():
    none = RunConfig(memory=Part("gradients", {"capacity": 0}))
    assert method_of(none) == "MAML"
    over = RunConfig(learner=Part("bmg", {"base": Part("arml")}))
    assert method_of(over) == "BMG over ARML"
