"""Thumbnails behind slots: of tasks that recall them, asked for, small, and never in the way."""

import json

import pytest
import torch

from tests.apps.web.conftest import Tab, memory_run, serve  # noqa: F401
from torchemo.apps.cli import main
from torchemo.core.errors import ConfigError
from torchemo.runs.load import load_best
from torchemo.runs.notes import thumbnails
from torchemo.runs.run import load, train
from torchemo.runs.storage import tensorfile


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    options = {
        "model.filters": 4, "memory.capacity": 5, "memory.k": 2, "train.validation_tasks": 2,
        "train.tasks": 3,
    }  # fmt: skip
    out = tmp_path_factory.mktemp("thumbnails") / "run"
    train("anil-emo", data="procedural", out=out, size=64, steps=2, options=options)
    return load_best(out)


def test_a_slot_shows_the_tasks_that_recall_it_most(opened):
    found = thumbnails.make(opened, per_slot=3, probes=20)
    assert found.images.shape == (5, 3, 3, thumbnails.SIDE, thumbnails.SIDE)
    episode = opened.source.sample("train", seed=thumbnails._SEED, start=0, count=20, n_query=1)
    recall = opened.system.predict(episode, steps=0, every_step=False).recall
    for slot in range(len(opened.system.memory.store)):
        weights = (recall.weights * (recall.slots == slot) * recall.active[:, None]).sum(1)
        assert int(found.known[slot]) == (3 if float(weights.max()) > 0 else 0)
        if float(weights.max()) == 0:
            continue
        best = int(weights.argsort(descending=True, stable=True)[0])
        x = episode.support.x[best][episode.support.y[best] == 0][0]
        blocks = torch.nn.functional.interpolate(x[None], (48, 48), mode="area")[0]
        assert torch.equal(found.of(slot)[0], (255 * blocks).round().byte())
    assert len(found.of(99)) == len(found.of(-1)) == 0


def test_they_are_made_shown_and_removed_when_asked(memory_run, serve, capsys):  # noqa: F811
    root = memory_run.root
    assert not (root / thumbnails.FILE).exists()  # training makes none
    with pytest.raises(SystemExit, match="0"):
        main(["memory", "thumbnails", str(root), "--per-slot", "2"])
    assert "images behind" in capsys.readouterr().out
    tab = Tab(serve(load(root)))
    tab.teach("red", "blue", "green", "black", "white", shots=1)
    tab.ask("red")
    task = tab.answer()["task"]
    counts = {slot["slot"]: slot["images"] for slot in task["recalled"]}
    assert max(counts.values()) == 2
    slot = max(counts, key=counts.get)
    reply = tab.client("GET", f"/api/slots/{slot}/0")
    assert (reply.status, reply.headers["content-type"]) == (200, "image/png")
    for wrong in (f"{slot}/2", "999/0", "0/x"):
        assert tab.client("GET", f"/api/slots/{wrong}").status == 404
    assert "images" in json.dumps(task["recalled"])
    with pytest.raises(SystemExit, match="0"):
        main(["memory", "thumbnails", str(root), "--remove"])
    assert thumbnails.load(root, step=2) is None


def test_those_of_another_checkpoint_or_damaged_ones_are_not_shown(opened, tmp_path):
    found = thumbnails.make(opened, per_slot=1, probes=4)
    path = thumbnails.save(tmp_path, found)
    assert torch.equal(thumbnails.load(tmp_path, step=found.step).images, found.images)
    assert thumbnails.load(tmp_path, step=found.step + 1) is None
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert thumbnails.load(tmp_path, step=found.step) is None
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])  # one bit of one pixel
    assert thumbnails.load(tmp_path, step=found.step) is None


@pytest.mark.parametrize(
    "change",
    [
        {"step": torch.zeros(2)},
        {"known": torch.zeros(3)},
        {"known": torch.tensor(1)},
        {"images": torch.zeros(2)},
    ],
)
def test_odd_thumbnails_are_not_shown(tmp_path, change):
    sound = {"images": torch.zeros(3, 1, 3, 4, 4, dtype=torch.uint8), "step": torch.tensor(1)}
    sound["known"] = torch.ones(3, dtype=torch.int64)
    file = tmp_path / thumbnails.FILE
    file.write_bytes(tensorfile.encode(sound))
    assert thumbnails.load(tmp_path, step=1) is not None
    file.write_bytes(tensorfile.encode({**sound, **change}))
    assert thumbnails.load(tmp_path, step=1) is None


def test_runs_without_slots_or_images_say_so(tmp_path):
    plain = train("maml", data="regression:sinusoid", out=tmp_path / "a", steps=1, shot=5)
    with pytest.raises(ConfigError, match="has no memory"):
        thumbnails.make(load_best(plain.root))
    points = train("maml-emo", data="regression:sinusoid", out=tmp_path / "b", steps=1, shot=5)
    with pytest.raises(ConfigError, match="not made of images"):
        thumbnails.make(load_best(points.root))
