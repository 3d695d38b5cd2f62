"""Images of your own: any form of them, any number per class, answered as tensors would be."""

import json
import shutil
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, RunConfig
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners import LEARNERS
from torchemo.models.norm import Bn
from torchemo.runs import adapt as adaptation
from torchemo.runs.adapt import adapt, query_pictures
from torchemo.runs.experiment import build_trainer
from torchemo.runs.load import Trained
from torchemo.runs.score import memory_digest
from torchemo.training.classes import for_shots
from torchemo.training.predict import predict

SIZE = 16
SHAPE = TaskShape("classification", (3, SIZE, SIZE), 2, base_classes=6)
CONFIG = RunConfig(
    learner=Part("maml", {"steps": 2}),
    model=Part("conv4", {"filters": 4}),
    data=DataConfig(image_size=SIZE, n_way=2),
)
KEY = Part("transformer", {"dim": 8, "heads": 2, "ff": 8, "layers": 1})
MEMORY = Part("gradients", {"capacity": 3, "k": 2, "key": KEY, "aggregator": Part("sum")})
PROTO = Part("proto-maml", {"steps": 1})
RED, BLUE, GREEN = (220, 30, 30), (30, 40, 220), (30, 200, 40)


def trained(config=CONFIG, shape=SHAPE):
    """A run that never met data: every number is as it was drawn."""
    trainer = build_trainer(config, shape)
    if trainer.memory is not None:
        g = generator_for(0, "tasks")
        x = torch.rand(3, 4, *shape.x, generator=g)
        y = torch.arange(4).repeat(3, 1) % 2
        episode = Episode(Batch(x, y), Batch(x, y), domain=torch.tensor([0, 1, 0]))
        trainer.step(episode)
    return Trained(config, trainer.system, shape, ("stones", "leaves"))


def answer_folder(run, support, *, query, **how):
    return adapt(run, support, **how).predict(query)


def with_memory(**more):
    return replace(CONFIG, memory=MEMORY, **more)


def noise(colour, seed, *, size=SIZE):
    grain = np.random.default_rng(seed).integers(-25, 26, (size, size, 3))
    return Image.fromarray((np.array(colour) + grain).clip(0, 255).astype(np.uint8))


def save(image, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


@pytest.fixture
def folders(tmp_path):
    """Two red and three blue support images; two queries of either colour."""
    support, query = tmp_path / "support", tmp_path / "query"
    for i in range(2):
        save(noise(RED, i), support / "red" / f"{i}.png")
        save(noise(RED, 10 + i), query / f"red {i}.png")
        save(noise(BLUE, 20 + i), query / "more" / f"blue {i}.png")
    for i in range(3):
        save(noise(BLUE, 30 + i), support / "blue" / f"{i}.png")
    return support, query


def tensors(paths):
    return torch.stack(
        [torch.from_numpy(np.asarray(Image.open(p)).copy()).permute(2, 0, 1) / 255 for p in paths]
    )


@pytest.mark.parametrize("config", [CONFIG, with_memory()], ids=["plain", "memory"])
def test_a_folder_is_answered_as_the_same_tensors_are(folders, config):
    support, query = folders
    run = trained(config)
    found = answer_folder(run, support, query=query)
    files = [*sorted((support / "blue").iterdir()), *sorted((support / "red").iterdir())]
    asked = [query / p.file for p in found.predictions]
    episode = Episode(
        Batch(tensors(files)[None], torch.tensor([[0, 0, 0, 1, 1]])),
        Batch(tensors(asked)[None], torch.zeros(1, 4, dtype=torch.int64)),
    )
    system = run.system
    found_by_tensors = predict(
        for_shots(system.learner, (3, 2)),
        system.params,
        episode,
        memory=system.memory,
        statistics="inductive",
    )
    expected = found_by_tensors.outputs[-1]
    got = torch.tensor([p.probabilities for p in found.predictions])
    assert torch.allclose(got, expected[0].softmax(1), atol=1e-6)
    assert not torch.allclose(got[0], got[-1], atol=1e-3)  # the answers are not all alike
    assert found.classes == ("blue", "red")
    assert found.shots == (3, 2)
    assert found.inner_steps == 2


def test_answers_are_printed_short_and_shown_as_a_table(folders):
    support, query = folders
    answers = answer_folder(trained(), support, query=query)
    assert repr(answers).startswith("Answers(MAML: ")
    shown = answers._repr_html_()
    assert shown.count("<tr>") == 1 + len(answers.predictions)
    assert answers.predictions[0].predicted in shown


def test_predictions_name_the_two_most_probable_classes(folders):
    support, query = folders
    save(noise(GREEN, 1), support / "green" / "0.png")
    run = trained(shape=replace(SHAPE, n_out=3))
    for p in answer_folder(run, support, query=query).predictions:
        ordered = sorted(zip(p.probabilities, ("blue", "green", "red"), strict=True), reverse=True)
        assert ordered[:2] == [
            (p.probability, p.predicted),
            (p.runner_up_probability, p.runner_up),
        ]
        assert sum(p.probabilities) == pytest.approx(1)


def test_the_names_of_queries_are_those_within_their_folder(folders):
    _, query = folders
    names = ["red 0.png", "red 1.png", "more/blue 0.png", "more/blue 1.png"]
    assert sorted(query_pictures(query)) == sorted(names)
    assert list(query_pictures(query / "red 0.png")) == ["red 0.png"]


def test_an_image_is_the_same_in_any_size_mode_and_rotation(folders, tmp_path):
    support, _ = folders
    # Four plain quarters survive enlarging by whole factors exactly, up to a little ringing.
    pixels = np.zeros((SIZE, SIZE, 3), np.uint8)
    pixels[: SIZE // 2] = RED
    pixels[:, : SIZE // 2] += 30
    upright = Image.fromarray(pixels)
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    query = tmp_path / "q"
    save(upright, query / "a.png")
    save(turned, query / "b.png", exif=exif)
    save(upright.convert("RGBA"), query / "c.png")
    save(upright.convert("P", palette=Image.Palette.ADAPTIVE), query / "d.png")
    save(upright.resize((64, 32), Image.Resampling.NEAREST), query / "e.bmp")
    found = {
        p.file: p.probability for p in answer_folder(trained(), support, query=query).predictions
    }
    for name in ("b.png", "c.png", "d.png"):
        assert found[name] == pytest.approx(found["a.png"], abs=1e-6), name
    assert found["e.bmp"] == pytest.approx(found["a.png"], abs=0.05)


def test_the_order_of_files_and_classes_has_no_say(folders, tmp_path):
    support, query = folders
    renamed = tmp_path / "renamed"
    for colour in ("red", "blue"):
        for i, path in enumerate(sorted((support / colour).iterdir(), reverse=True)):
            save(Image.open(path), renamed / colour / f"{i}.png")
    run = trained()
    first, second = (answer_folder(run, s, query=query) for s in (support, renamed))
    for one, other in zip(first.predictions, second.predictions, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)


@pytest.mark.parametrize("n_way", [2, 3])
def test_proto_maml_tells_plain_colours_apart_for_any_number_of_classes(folders, n_way):
    support, query = folders
    if n_way == 3:
        save(noise(GREEN, 1), support / "green" / "0.png")
        save(noise(GREEN, 2), query / "green 0.png")
    run = trained(replace(CONFIG, learner=PROTO))
    found = answer_folder(run, support, query=query)
    assert len(found.classes) == n_way
    for p in found.predictions:
        assert p.predicted in p.file


@pytest.mark.parametrize("config", [CONFIG, with_memory(), with_memory(learner=PROTO)])
def test_any_number_of_classes_is_answered(folders, config):
    support, query = folders
    save(noise(GREEN, 1), support / "green" / "0.png")
    found = answer_folder(trained(config), support, query=query)
    assert found.classes == ("blue", "green", "red")
    assert all(sum(p.probabilities) == pytest.approx(1) for p in found.predictions)
    # Images of one colour are more alike than any two colours.
    if config.learner.name == "proto-maml":
        assert all(p.predicted in p.file for p in found.predictions)
    assert len(found.recalled) == (0 if config.memory.name == "none" else 2)


def test_one_class_leaves_nothing_to_decide(folders):
    support, query = folders
    shutil.rmtree(support / "red")
    with pytest.raises(ConfigError, match="two classes or more"):
        answer_folder(trained(), support, query=query)


def test_what_is_recalled_is_told_nearest_first_and_the_memory_is_left_alone(folders):
    support, query = folders
    # Recall dropout belongs to meta-training alone.
    run = trained(replace(CONFIG, memory=MEMORY.set(recall_dropout=1.0)))
    memory = run.system.memory
    before = memory_digest(memory)
    found = answer_folder(run, support, query=query)
    assert memory_digest(memory) == before
    assert len(found.recalled) == 2
    assert found.recalled[0].distance <= found.recalled[1].distance
    for one in found.recalled:
        assert one.domain == ("stones", "leaves", "stones")[one.slot]
        assert one.age == int(memory.store.ages[one.slot])
    assert sum(one.weight for one in found.recalled) == pytest.approx(1)
    assert answer_folder(trained(), support, query=query).recalled == ()


def test_images_unlike_those_of_training_are_answered_without_the_memory(folders):
    support, query = folders
    run = trained(replace(CONFIG, memory=MEMORY.set(skip_unfamiliar=0.9)))
    found = answer_folder(run, support, query=query)
    assert (found.familiar, len(found.recalled)) == (True, 2)  # too few tasks to judge by
    elsewhere = torch.eye(8)[:1] + 1e-3 * torch.randn(64, 8, generator=generator_for(0, "keys"))
    run.system.memory.skip_unfamiliar.see(elsewhere)
    found = answer_folder(run, support, query=query)
    assert (found.familiar, found.recalled) == (False, ())
    alone = answer_folder(without_memory(run), support, query=query)
    assert [p.probabilities for p in found.predictions] == [
        p.probabilities for p in alone.predictions
    ]
    assert alone.familiar is None


def without_memory(run):
    return replace(run, system=replace(run.system, memory=None))


def test_images_whose_slots_failed_validation_are_answered_without_the_memory(folders):
    support, query = folders
    options = {"capacity": 2, "k": None, "warmup": 1, "key": KEY, "skip_unhelpful": 0.0}
    run = trained(replace(CONFIG, memory=Part("offsets", options)))
    memory, generator = run.system.memory, generator_for(0, "offsets")
    for value in memory.store.values.values():
        value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    passed = answer_folder(run, support, query=query)
    assert (passed.familiar, passed.helpful, len(passed.recalled)) == (None, True, 2)
    memory.skip_unhelpful.failed.fill_(True)
    failed = answer_folder(run, support, query=query)
    assert (failed.familiar, failed.helpful, failed.recalled) == (None, False, ())
    alone = answer_folder(without_memory(run), support, query=query)
    assert failed.predictions == alone.predictions != passed.predictions
    assert (failed.method, alone.method, alone.helpful) == ("MAML + offsets", "MAML", None)


def alone_and_together(run, support, query):
    """Probabilities of the queries by name: all at once, backwards in threes, and one by one."""
    adapted, pictures = adapt(run, support), query_pictures(query)
    names = list(pictures)
    groups = {
        "together": [names],
        "threes": [names[::-1][i : i + 3] for i in range(0, len(names), 3)],
        "alone": [[name] for name in names],
    }
    return {
        kind: {
            p.file: torch.tensor(p.probabilities)
            for group in parts
            for p in adapted.answer({n: pictures[n] for n in group}).predictions
        }
        for kind, parts in groups.items()
    }


def check_alone(run, folders):
    support, query = folders
    save(noise(GREEN, 50), query / "green.png")
    found = alone_and_together(run, support, query)
    rows = torch.stack(list(found["together"].values()))
    assert (rows - rows[0]).abs().max() > 1e-4  # images differ, and so do answers
    for name, expected in found["together"].items():
        for kind in ("threes", "alone"):
            assert torch.allclose(found[kind][name], expected, atol=1e-5), (name, kind)


@pytest.mark.parametrize("name", list(LEARNERS))
def test_no_answer_depends_on_the_other_queries(folders, name):
    check_alone(trained(replace(CONFIG, learner=Part(name))), folders)


@pytest.mark.parametrize("learner", ["maml", "anil", "protonet"])
@pytest.mark.parametrize("bn", get_args(Bn))
def test_no_answer_depends_on_the_other_queries_with_any_normalisation(folders, learner, bn):
    model = Part("conv4", {"filters": 8, "bn": bn})
    check_alone(trained(replace(CONFIG, learner=Part(learner), model=model)), folders)


def test_a_memory_changes_nothing_about_it(folders):
    check_alone(trained(with_memory()), folders)


def test_many_queries_are_answered_in_parts_and_come_back_in_order(folders, monkeypatch):
    support, query = folders
    for i in range(5):
        save(noise(GREEN, 50 + i), query / f"{i}.png")
    whole = answer_folder(trained(), support, query=query)
    monkeypatch.setattr(adaptation, "QUERIES_AT_ONCE", 4)
    parts = answer_folder(trained(), support, query=query)
    assert [p.file for p in parts.predictions] == [p.file for p in whole.predictions]
    for one, other in zip(parts.predictions, whole.predictions, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)
    assert whole.to_dict()["statistics"] == "inductive"


def test_inverting_images_is_the_same_as_inverted_images(folders, tmp_path):
    support, query = folders
    for path in [*support.rglob("*.png"), *query.rglob("*.png")]:
        place = tmp_path / "inverted" / path.relative_to(tmp_path)
        save(Image.fromarray(255 - np.asarray(Image.open(path))), place)
    run = trained()
    asked = answer_folder(run, support, query=query, invert=True)
    made = answer_folder(
        run, tmp_path / "inverted" / "support", query=tmp_path / "inverted" / "query"
    )
    assert asked == made
    assert asked != answer_folder(run, support, query=query)


def test_more_inner_steps_can_be_asked_for(folders):
    support, query = folders
    run = trained()
    found = {s: answer_folder(run, support, query=query, steps=s) for s in (0, 5)}
    assert (found[0].inner_steps, found[5].inner_steps) == (0, 5)
    assert found[0].predictions != found[5].predictions


def test_folders_without_what_they_should_hold_are_refused(folders, tmp_path):
    support, query = folders
    run = trained()
    with pytest.raises(DataError, match=r"nowhere: there is no such folder"):
        answer_folder(run, tmp_path / "nowhere", query=query)
    with pytest.raises(DataError, match="nowhere"):
        answer_folder(run, support, query=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images"):
        answer_folder(run, support, query=tmp_path / "empty")
    (support / "third").mkdir()
    with pytest.raises(DataError, match="class 'third' has no images"):
        answer_folder(run, support, query=query)


def test_a_broken_image_is_left_out_and_named(folders):
    support, query = folders
    fitted = adapt(trained(), support)
    expected = fitted.predict(query)
    (query / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    found = fitted.predict(query)
    assert found.predictions == expected.predictions
    assert [bad.name for bad in found.left_out] == ["broken.jpg"]
    with pytest.raises(DataError, match=r"broken\.jpg"):
        fitted.predict(query, strict=True)
    with pytest.raises(DataError, match=r"broken\.jpg"):
        fitted.predict(query / "broken.jpg")


def test_a_run_on_numbers_takes_no_images(folders):
    support, query = folders
    config = RunConfig(model=Part("mlp", {"hidden": (4,)}))
    run = trained(config, TaskShape("regression", (1,), 1, n_shot=4))
    with pytest.raises(ConfigError, match="not on images"):
        answer_folder(run, support, query=query)


def test_answers_are_plain_for_machines(folders):
    support, query = folders
    found = answer_folder(trained(with_memory()), support, query=query).to_dict()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["classes"] == {"blue": 3, "red": 2}
    assert list(again["predictions"][0]["probabilities"]) == ["blue", "red"]
    assert set(again["recalled"][0]) == {"slot", "distance", "weight", "age", "domain"}
