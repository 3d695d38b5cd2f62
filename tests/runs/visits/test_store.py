"""A store of visits: what it recalls, forgets, renames, merges and exports, byte for byte."""

import json
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runs.test_adapt import CONFIG, trained
from tests.runs.visits.conftest import answers, everything, form, images, visit
from torchemo.config.registry import Part
from torchemo.core.errors import CheckpointError, ConfigError, DataError
from torchemo.core.types import Batch
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.recognise import ByName
from torchemo.runs.adapt import fit, support_batch
from torchemo.runs.visits import files
from torchemo.runs.visits.index import FORMAT_VERSION, INDEX, Settings
from torchemo.runs.visits.returning import check_store, fit_again, fresh_index
from torchemo.runs.visits.store import reading, writing
from torchemo.training.lifelong import revisit

PAIR = ("blue", "red")
GOLDEN = Path(__file__).with_name("golden") / "format-1"


def test_a_first_visit_answers_as_without_a_store_bit_for_bit(run, store):
    found = visit(run, store, 0, *PAIR)
    query = images(900, *PAIR, shots=3)["red"]
    alone = fit(run, images(0, *PAIR), form(run))
    assert torch.equal(found.adapted.probabilities(query), alone.probabilities(query))
    assert found.adapted.seen.words == "Not seen before."


def test_what_comes_back_is_answered_as_by_the_memory_in_ram(run, store):
    for seed in range(3):
        visit(run, store, seed, *PAIR)
    # The same by the library alone: three visits that know nothing of each other, then a fourth.
    learner, params = run.system.learner, run.system.params
    memory = LifelongMemory(ByName(), head=learner.model.head)
    for seed in range(3):
        alone = LifelongMemory(ByName(), head=learner.model.head)
        batch = support_batch(images(seed, *PAIR))
        for kept in revisit(learner, params, batch, alone, names=[PAIR]).remember():
            memory.add(kept)
    now = images(7, *PAIR)
    query = torch.cat(list(images(900, *PAIR, shots=3).values()))
    expected = revisit(learner, params, support_batch(now), memory, names=[PAIR])
    rows = expected.outputs(query[None])[0].softmax(1)
    found = answers(run, reading(store), 7, *PAIR)
    torch.testing.assert_close(found, rows, rtol=0, atol=1e-6)
    without = fit(run, now, form(run)).probabilities(query)
    assert not torch.allclose(found, without, atol=1e-4)


def test_what_was_seen_is_said_in_words(run, store):
    for seed in range(3):
        visit(run, store, seed, *PAIR)
    found = visit(run, store, 3, "green", "red")
    assert found.adapted.seen.words == (
        "1 of 2 classes were seen 3 times, last on 2026-11-03. New: green."
    )
    again = visit(run, store, 4, *PAIR).adapted.seen
    assert again.words == "Seen: blue 3 times, red 4 times; last on 2026-11-04."
    assert (again.visits, again.last[:10]) == (4, "2026-11-04")
    assert [line[:3] for line in reading(store).classes] == [
        *[("blue", 4, 4), ("green", 1, 1), ("red", 5, 5)]
    ]


def test_the_same_images_count_once(run, store):
    visit(run, store, 0, *PAIR)
    first = answers(run, reading(store), 1, *PAIR)
    found = visit(run, store, 1, *PAIR)
    again = visit(run, store, 1, *PAIR)
    assert len(reading(store)) == 2
    assert again.adapted.seen.words == (
        "These images are in the store since 2026-11-02, and count once."
        " Seen once, last on 2026-11-01."
    )
    query = images(900, *PAIR, shots=3)["red"]
    assert torch.equal(again.adapted.probabilities(query), found.adapted.probabilities(query))
    assert torch.equal(answers(run, reading(store), 1, *PAIR), first)


def test_forgetting_leaves_the_store_as_if_the_visit_never_was(run, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    visit(run, one, 0, *PAIR)
    visit(run, one, 1, "green", "red")
    visit(run, one, 2, *PAIR)
    held = everything(one)
    (secret,) = [v for v in reading(one).index.visits if "green" in v.classes]
    with writing(one) as store:
        assert store.forget(classes=["green"]) == (secret,)
    visit(run, other, 0, *PAIR)
    visit(run, other, 2, *PAIR)
    left, never = everything(one), everything(other)
    assert set(left) == set(never)
    tensors = [name for name in left if name.startswith("visits/")]
    assert len(tensors) == 4
    assert all(left[name] == never[name] for name in tensors)
    assert torch.equal(answers(run, reading(one), 9, *PAIR), answers(run, reading(other), 9, *PAIR))
    # Byte for byte: no file holds a piece of what is gone, nor its name, date or digest.
    gone = [held[files.file_name(secret.id, kind)] for kind in files.KINDS]
    pieces = [data[i : i + 64] for data in gone for i in range(len(data) // 2, len(data) - 64, 64)]
    words = [w.encode() for w in ("green", secret.id, secret.gradients.sha256, secret.when)]
    assert all(piece in b"".join(held.values()) for piece in (*pieces, *words))
    for name, data in left.items():
        assert not [p for p in (*pieces, *words) if p in data], name


def test_renaming_changes_names_alone(run, store):
    visit(run, store, 0, *PAIR)
    before = answers(run, reading(store), 5, *PAIR)
    with writing(store) as opened:
        assert opened.rename("red", "crimson") == 1
    assert [line.name for line in reading(store).classes] == ["blue", "crimson"]
    assert b'"red"' not in b"".join(everything(store).values())
    visit(run, store, 1, *PAIR)
    with writing(store) as opened:
        with pytest.raises(ConfigError, match="there is already a class 'red'") as refused:
            opened.rename("crimson", "red")
        assert "--join" in refused.value.hint
        opened.rename("crimson", "red", join=True)
        with pytest.raises(ConfigError, match="are two classes of the visit"):
            opened.rename("red", "blue", join=True)
        with pytest.raises(ConfigError, match="knows no class 'crimson'"):
            opened.rename("crimson", "x")
        opened.forget(visits=[reading(store).index.by_age[1].id[:6]])
    assert torch.equal(answers(run, reading(store), 5, *PAIR), before)


@pytest.mark.parametrize("exported", [False, True])
def test_merging_is_visiting_in_sequence(run, tmp_path, exported):
    together, one, other = (tmp_path / name for name in ("together", "one", "other"))
    for seed in range(5):
        visit(run, together, seed, *PAIR)
        visit(run, one if seed in (0, 3) else other, seed, *PAIR)
    visit(run, one, 4, *PAIR)  # both have it
    second = other
    if exported:
        second = tmp_path / "other.zip"
        files.export(reading(other).source, reading(other).index, second)
        assert reading(second).faults() == []
    merged = tmp_path / "merged"
    with writing(merged, otherwise=fresh_index(run, merged)) as store:
        assert store.merge([reading(second), reading(one)]) == (5, ())
        assert store.merge([reading(one), reading(second)]) == (0, ())
    visits = [path for path in everything(together) if path.startswith("visits/")]
    assert {p: everything(together)[p] for p in visits} == {
        p: d for p, d in everything(merged).items() if p.startswith("visits/")
    }
    assert [v.id for v in reading(merged).index.by_age] == [
        v.id for v in reading(together).index.by_age
    ]
    now = answers(run, reading(together), 9, *PAIR)
    assert torch.equal(answers(run, reading(merged), 9, *PAIR), now)


@pytest.mark.parametrize(("controller", "left"), [("fifo", {2, 3}), ("lru", {1, 3})])
def test_a_full_store_forgets_what_its_controller_says(run, store, controller, left):
    settings = Settings(capacity=2, controller=controller)
    visit(run, store, 0, "blue", "red", settings=settings)
    visit(run, store, 1, "green", "white")
    visit(run, store, 2, "green", "white")  # recalls 1; both forget 0
    if controller == "lru":
        with writing(store) as opened:  # 1 comes back alone, so that 2 was recalled longest ago
            (second,) = [v for v in opened.index.visits if v.when[9] == "2"]
            found = fit_again(run, images(3, "green", "white"), form(run), opened)
            found = replace(found, new=found.new._replace(recalled=(second.id,)))
            assert [v.when[9] for v in found.keep(opened, when="2026-11-04")] == ["3"]
    else:
        visit(run, store, 3, "green", "white")
    assert {int(v.when[9]) - 1 for v in reading(store).index.visits} == left
    assert len(list((store / files.FOLDER).iterdir())) == 2 * 2  # two files of each visit


def test_a_store_of_other_weights_is_refused_with_the_reason(run, store):
    visit(run, store, 0, *PAIR)
    other = trained(CONFIG)
    other.system.params["head.bias"] = other.system.params["head.bias"] + 1e-3
    opened = reading(store)
    check_store(run, opened)
    with pytest.raises(ConfigError, match="belongs to other weights: it was made with MAML") as no:
        fit_again(other, images(1, *PAIR), form(other), opened)
    assert "fits only the weights" in no.value.hint
    steps = replace(run, config=replace(CONFIG, learner=Part("maml", {"steps": 3})))
    with pytest.raises(ConfigError, match="belongs to other weights"):
        check_store(steps, opened)


def test_a_learner_that_visits_cannot_join_is_refused(store):
    config = replace(CONFIG, learner=Part("protonet"))
    with pytest.raises(ConfigError, match="has no inner steps on a shared network") as refused:
        fresh_index(trained(config), store)
    assert "maml" in refused.value.hint
    assert not store.exists()


HOSTILE = (
    *("../../etc/passwd", "<script>alert(1)</script>", "\x1b[31mred", "\u202egnp", "a\nb\x00c"),
    *("\udcff\udcfe", "x" * 255, '"', "CON", ".", "🦜", "classes\\..\\", "{{7*7}}", "=1+1"),
)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_any_name_is_kept_as_it_is_and_names_no_file(run, store, name):
    visit(run, store, 0, "blue", name)
    assert [one.known for one in visit(run, store, 1, "blue", name).adapted.seen.classes] == [
        "blue",
        name,
    ]
    own = r"store\.json|\.lock|\.owner"
    allowed = re.compile(own + r"|visits/[0-9a-f]{16}\.(gradients|means)\.safetensors")
    assert all(allowed.fullmatch(path) for path in everything(store))
    with writing(store) as opened:
        opened.forget(classes=[name])
    assert len(reading(store)) == 0


@pytest.mark.parametrize("name", ["", "  ", "x" * 256])
def test_a_name_that_is_none_is_refused(run, store, name):
    with pytest.raises(ConfigError, match="a class name has 1 to 255 characters"):
        visit(run, store, 0, "blue", name)
    visit(run, store, 0, *PAIR)
    with writing(store) as opened, pytest.raises(ConfigError, match="a class name has"):
        opened.rename("blue", name)


def test_two_spellings_of_one_name_are_one_class(run, store):
    visit(run, store, 0, "caf\u00e9", "red")
    found = visit(run, store, 1, "cafe\u0301", "red")
    assert [one.visits for one in found.adapted.seen.classes] == [1, 1]
    with pytest.raises(DataError, match="are both named"):
        visit(run, store, 2, "caf\u00e9", "cafe\u0301")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"recognise": "smell"}, "recognise should be one of"),
        ({"capacity": 0}, "capacity should be 1 or more"),
        ({"clip": 0.0}, "clip should be above 0"),
        ({"noise": -1.0, "clip": 1.0}, "noise should be 0 or more"),
        ({"noise": 0.1}, "noise needs clip"),
        ({"controller": "random"}, "random"),
    ],
)
def test_wrong_settings_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        Settings(**wrong)


def test_a_store_of_a_newer_format_names_who_wrote_it(run, store):
    from torchemo.runs.storage.seal import seal, unseal

    visit(run, store, 0, *PAIR)
    body = unseal((store / INDEX).read_bytes(), what="it")
    del body["seal"]
    body["format_version"], body["versions"]["torchemo"] = FORMAT_VERSION + 1, "9.9"
    (store / INDEX).write_bytes(seal(body))
    with pytest.raises(
        CheckpointError, match=rf"has format {FORMAT_VERSION + 1}, written by torchemo '9\.9'"
    ) as newer:
        reading(store)
    assert "Upgrade" in newer.value.hint


def test_no_image_is_kept(run, store):
    shown = images(0, *PAIR, shots=2)
    visit(run, store, 0, *PAIR, shots=2)
    held = b"".join(everything(store).values())
    for x in shown.values():
        for one in x:
            for row in (one * 255).round().byte(), one:
                data = row.numpy().tobytes()
                assert not [i for i in range(0, len(data) - 32, 32) if data[i : i + 32] in held]
    assert json.loads((store / INDEX).read_text())["visits"][0]["shots"] == [2, 2]


def test_an_export_is_a_zip_that_can_be_checked(run, store, tmp_path):
    visit(run, store, 0, *PAIR)
    out = tmp_path / "mine.zip"
    files.export(reading(store).source, reading(store).index, out)
    assert zipfile.ZipFile(out).testzip() is None
    assert reading(out).index == reading(store).index
    with pytest.raises(ConfigError, match="exists already"):
        files.export(reading(store).source, reading(store).index, out)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_support_of_a_task_is_what_adapt_uses(run):
    batch = support_batch(images(0, *PAIR, shots=2))
    assert isinstance(batch, Batch)
    assert sorted(batch.y[0].tolist()) == [0, 0, 1, 1]


def test_a_store_of_the_first_format_is_read_for_ever(tmp_path):
    place = shutil.copytree(GOLDEN, tmp_path / "store")
    found = reading(place)
    assert found.faults() == []
    assert [v.classes for v in found.index.by_age] == [("bl\u00e5", "red"), ("red", "green")]
    assert [line[:3] for line in found.classes] == [
        *[("bl\u00e5", 1, 1), ("green", 1, 2), ("red", 2, 3)]
    ]
    values = found.memory(("head.weight",)).visits[1].values["head.weight"]
    assert torch.equal(values, torch.arange(8.0).view(2, 2, 2) + 1)
    with writing(place) as store:
        store.forget(classes=["green"])
    assert len(reading(place)) == 1
