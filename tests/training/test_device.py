"""Where a command computes: what is there, what is refused in words, and what it changes."""

from dataclasses import replace

import pytest
import torch

from tests.pretend import SENT, WAITS, on_pretend
from tests.training.brief import with_two_inner_steps
from torchemo.config.presets import names, preset
from torchemo.config.registry import Part
from torchemo.config.run import AugmentSpec, StreamSpec
from torchemo.core.errors import ConfigError, DataError, ResourceError
from torchemo.core.rng import generator_for
from torchemo.core.tree import expand
from torchemo.core.types import Batch, TaskShape
from torchemo.data.source import open_source, sent_to
from torchemo.lab import doctor_device
from torchemo.lab.doctor_device import device_report
from torchemo.models import build_model, in_precision
from torchemo.runs.compare import compare
from torchemo.runs.environment import differences, environment
from torchemo.runs.experiment import build_system, build_trainer, open_tasks
from torchemo.training.device import (
    CPU,
    HERE,
    Place,
    batch_to,
    devices,
    open_device,
    open_place,
    to_device,
)

SHAPE = TaskShape("classification", x=(3, 16, 16), n_out=5)


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "mps", "tpu", "cpu:0:1", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name):
    with pytest.raises(ConfigError, match=f"no device '{name}'") as caught:
        open_device(name)
    assert caught.value.hint == f"Use one of: {', '.join(devices())}."


def test_a_precision_that_a_device_lacks_is_refused():
    with pytest.raises(ConfigError, match="cpu has no tf32"):
        open_place(precision="tf32")
    with pytest.raises(ConfigError, match="no precision 'fp8'"):
        open_place(precision="fp8")


def test_a_device_that_is_busy_is_refused_before_any_work(monkeypatch):
    def busy(*shape, device):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore")

    monkeypatch.setattr(torch, "zeros", busy)
    with pytest.raises(ResourceError, match="'cpu' cannot be used: CUDA error: all CUDA") as caught:
        open_place()
    assert "more" not in str(caught.value)


@pytest.mark.parametrize("name", ["conv4", "resnet12"])
def test_bf16_multiplies_roughly_and_gives_numbers_in_full(name):
    exact = build_model(Part(name), SHAPE)
    rough = in_precision(exact, "bf16")
    params = expand(exact.init(generator_for(0)), 2)
    x = torch.rand(2, 6, 3, 16, 16, generator=generator_for(1))
    want, got = exact(params, x), rough(params, x)
    assert got.dtype == torch.float32
    error = float((got - want).norm() / want.norm())
    assert 1e-4 < error < 0.05  # 2^-8 for each product, a few layers deep
    # As used at inner steps and for single queries too.
    assert rough.at(2).half
    assert in_precision(exact, "tf32") is exact


def test_a_network_of_vectors_has_no_bf16():
    tasks = TaskShape("regression", x=(1,), n_out=1)
    with pytest.raises(ConfigError, match="bf16 is for networks of images, not for MLP"):
        in_precision(build_model(Part("mlp"), tasks), "bf16")


def test_a_run_knows_where_it_was_computed():
    half = Place(CPU, "bf16")
    assert environment()["place"] == "cpu, float32"
    changed = differences(environment(), environment(half))
    assert changed == ["place cpu, float32 -> cpu, bf16"]


def test_results_of_two_precisions_are_compared_with_a_note():
    one = {
        "protocol": {"statistics": "inductive"},
        "data": "d",
        "episode": [0, 1],
        "domain": [-1, -1],
        "metric": "accuracy",
        "per_task": [[0.1], [0.4]],
        "method": "MAML",
        "seed": 0,
        "run": "a",
        "domains": [],
        "place": HERE.words,
    }
    with pytest.warns(UserWarning, match="in different ways: cpu, bf16; cpu, float32"):
        compare([one], [{**one, "run": "b", "place": "cpu, bf16"}])


def test_the_doctor_finds_a_device_sound(monkeypatch):
    monkeypatch.setattr(doctor_device, "PRESETS", ("maml-emo",))
    monkeypatch.setattr(doctor_device, "TIMED", 1)
    with on_pretend() as device:
        found = device_report(Place(device))
    assert found["ok"]
    assert found["equality"]["precision"] == "float64"
    assert found["equality"]["largest_relative_difference"] <= 1e-10
    assert all(one["ok"] for one in found["presets"])


QUICK = ("maml", "maml-emo-paper", "maml-offsets-joint")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in names()
        if not name.endswith("-published")  # the same with the sizes of the papers
    ],
)
def test_presets_train_are_saved_and_answer_on_a_device(name):
    with on_pretend() as device:
        check_preset(name, Place(device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in names() if not name.endswith("-published")])
def test_presets_train_on_a_real_device(name):
    check_preset(name, open_place(device="auto"))


@pytest.mark.gpu
def test_a_real_device_agrees_with_the_cpu():
    assert device_report(open_place(device="auto"))["ok"]


def check_preset(name, place):
    """Train, save, open elsewhere, go on, and evaluate both there and on the CPU."""
    config = preset(name)
    filters = 6 if name == "tapnet" else 2  # it needs more features than references
    config = replace(
        config,
        model=Part("conv4", {"filters": filters}),
        data=replace(config.data, image_size=16, n_query=2),
        train=replace(config.train, steps=1000, tasks=2),
    )
    if "warmup" in config.memory.options:
        config = replace(config, memory=config.memory.set(warmup=1))
    config = with_two_inner_steps(config)
    source = open_tasks(config)

    def tasks(number, split="train"):
        return source.sample(split, seed=0, start=2 * number, count=2)

    first = build_trainer(config, source.shape, place=place)
    for number in range(3):
        first.step(tasks(number))
    state = first.state_dict()
    second = build_trainer(config, source.shape, place=place)
    second.load_state_dict(state)
    assert second.step(tasks(3)).losses.device == place.device
    scores = [
        build_system(config, source.shape, state, place=at).evaluate([tasks(0, "val")])
        for at in (place, HERE)
    ]
    torch.testing.assert_close(scores[0].loss, scores[1].loss, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["maml", "maml-emo", "maml-emo-paper", "maml-offsets-joint"])
def test_a_step_waits_for_the_device_four_times_at_most(name):
    config = preset(name)
    config = replace(
        config,
        model=Part("conv4", {"filters": 2}),
        data=replace(config.data, image_size=16, n_query=2),
        train=replace(config.train, steps=1000, tasks=2),
    )
    if "warmup" in config.memory.options:
        config = replace(config, memory=config.memory.set(warmup=1))
    source = open_tasks(config)
    with on_pretend() as device:
        trainer = build_trainer(config, source.shape, place=Place(device))
        for number in range(4):  # slots are filled, or seeded, in the first two
            tasks = source.sample("train", seed=0, start=2 * number, count=2)
            WAITS.clear()
            trainer.step(tasks)
    assert sum(WAITS.values()) <= 4, WAITS


@pytest.mark.parametrize(
    "how",
    [{}, {"rotations": True}, {"stream": StreamSpec(pool=3)}],
    ids=["plain", "turned", "stream"],
)
def test_images_travel_in_a_quarter_of_the_bytes_and_arrive_as_on_the_cpu(how):
    data = preset("maml").data
    source = open_source(replace(data, image_size=16, n_query=2, **how))
    want = source.sample("train", seed=0, start=0, count=3)
    with on_pretend() as device:
        sent = sent_to(source, device).sample("train", seed=0, start=0, count=3)
        there = to_device(sent, device)
        numbers = want.support.x.numel() + want.query.x.numel()
        assert (SENT[torch.uint8], SENT[torch.float32]) == (numbers, 0)
        for part in ("support", "query"):
            assert getattr(there, part).x.device == device
            assert torch.equal(getattr(there, part).x.cpu(), getattr(want, part).x)
            assert torch.equal(getattr(there, part).y.cpu(), getattr(want, part).y)
    # Images as they are kept need no device.
    assert torch.equal(to_device(sent, CPU).query.x, want.query.x)
    assert sent_to(source, CPU) is source


def test_images_of_base_classes_travel_alike_and_augmented_ones_are_scaled_first():
    plain = open_source(replace(preset("maml").data, image_size=16))
    which = {"seed": 0, "start": 0, "count": 1, "size": 8}
    with on_pretend() as device:
        sent = sent_to(plain, device).batches(**which)
        assert sent.x.dtype == torch.uint8
        assert torch.equal(batch_to(sent, device).x.cpu(), plain.batches(**which).x)
        changed = replace(plain, augment=AugmentSpec(flip=True, jitter=0.4))
        same = sent_to(changed, device)
        assert torch.equal(same.batches(**which).x, changed.batches(**which).x)
        for split, dtype in (("train", torch.float32), ("test", torch.uint8)):
            assert same.sample(split, seed=0, start=0, count=1).query.x.dtype == dtype
        curves = open_source(preset("maml", regression=True).data)
        assert sent_to(curves, device) is curves


@pytest.mark.gpu
def test_a_real_device_scales_images_to_the_bits_of_the_cpu():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 16, 16)
    batch = Batch(images, torch.zeros(1, 1))
    there = batch_to(batch, open_device("auto"))
    assert torch.equal(there.x.cpu(), batch_to(batch, CPU).x)


def test_numbers_are_refused_before_they_are_moved():
    config = preset("maml", regression=True, n_shot=5)
    source = open_tasks(config)
    bad = source.sample("train", seed=0, start=0, count=2)
    bad.support.x[1, 0] = torch.nan
    with on_pretend() as device:
        trainer = build_trainer(config, source.shape, place=Place(device))
        with pytest.raises(DataError, match="support inputs of task 1 hold NaN"):
            trainer.step(bad)
        with pytest.raises(DataError, match="support inputs of task 1 hold NaN"):
            trainer.system.predict(bad)
