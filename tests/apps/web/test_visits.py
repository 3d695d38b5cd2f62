"""The store behind the page: opt-in, one board is one visit, list, rename, forget."""

import json

import pytest

from tests.apps.web.conftest import Tab, image
from torchemo.apps.web.visits import Visits
from torchemo.core.errors import ConfigError
from torchemo.runs.visits.store import reading


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def tab(serve, run, store):
    return Tab(serve(run, store))


def teach(tab, seed, *names):
    """Teach classes with images of their own for every visit."""
    for name in names:
        key = tab.act("add_class", name=name).json["boxes"][-1]["key"]
        assert (
            tab("POST", f"/images?box={key}&name={seed}.png", image(name, 100 + seed)).status == 200
        )


def remember(tab):
    reply = tab("POST", "/remember")
    assert reply.status == 200, reply.json
    return reply.json


def change(tab, **asked):
    return tab.client("POST", "/api/visits/do", json.dumps(asked).encode())


def test_nothing_is_kept_unless_the_page_was_started_so(serve, run):
    tab = Tab(serve(run))
    teach(tab, 0, "red", "blue")
    assert tab.client("GET", "/api/run").json["remember"] is False
    assert tab("POST", "/remember").status == 400
    assert tab.client("GET", "/api/visits").status == 404
    assert change(tab, action="forget", **{"class": "red"}).status == 404


def test_answering_alone_keeps_nothing(tab, store):
    teach(tab, 0, "red", "blue")
    tab.ask("red")
    tab.answer()
    assert len(reading(store)) == 0
    assert tab.client("GET", "/api/run").json["remember"] is True


def test_three_visits_are_recognised_used_and_said(tab, store):
    said = []
    for seed in range(3):
        tab.act("clear")
        teach(tab, seed, "red", "blue")
        tab.ask("red")
        found = tab.answer()
        assert found["job"]["error"] is None
        said.append(found["task"]["seen"]["words"].split(", last")[0])
        (query,) = found["queries"]
        if seed:
            assert found["task"]["sides"] == ["with past visits", "without past visits"]
            assert query["answer"]["without"] != query["answer"]["probabilities"]
        else:
            assert query["answer"]["without"] is None
        assert not found["kept"]
        assert remember(tab)["kept"]
    assert said == ["Not seen before.", "Seen once", "Seen 2 times"]
    listing = tab.client("GET", "/api/visits").json
    assert listing["visits"] == 3
    assert [one["visits"] for one in listing["classes"]] == [3, 3]


def test_one_board_is_one_visit(tab, store):
    teach(tab, 0, "red", "blue")
    remember(tab)
    tab.ask("red")
    first = tab.answer()
    assert first["task"]["seen"]["words"].startswith("These images are in the store since")
    before = reading(store).index.visits[0].id
    teach(tab, 1, "green")
    assert not tab.state["kept"]
    found = tab.answer()
    assert found["task"]["seen"]["visits"] == 0  # its own images count once
    remember(tab)
    (visit,) = reading(store).index.visits
    assert visit.id != before
    assert visit.classes == ("blue", "green", "red")
    assert tab.act("undo").json["kept"] is False
    assert len(reading(store)) == 1


def test_forgetting_and_renaming_change_the_store_and_the_answers(tab, store):
    for seed in range(2):
        tab.act("clear")
        teach(tab, seed, "red", "blue")
        remember(tab)
    tab.act("clear")
    teach(tab, 2, "red", "blue")
    tab.ask("red")
    assert tab.answer()["task"]["seen"]["visits"] == 2
    assert change(tab, action="rename", **{"class": "red", "name": "rouge"}).status == 200
    assert tab.state["task"] is None  # what was answered no longer holds
    assert tab.answer()["task"]["seen"]["words"].startswith("1 of 2 classes were seen 2 times")
    assert change(tab, action="rename", **{"class": "red", "name": "x"}).status == 400
    assert change(tab, action="rename", **{"class": "rouge", "name": "blue"}).status == 400
    listing = change(tab, action="forget", **{"class": "rouge"}).json
    assert (listing["visits"], listing["classes"]) == (0, [])
    assert tab.answer()["task"]["seen"]["words"] == "Not seen before."
    assert [p.name for p in (store / "visits").iterdir()] == []


def test_tabs_share_the_store(serve, run, store):
    client = serve(run, store)
    one, two = Tab(client), Tab(client)
    teach(one, 0, "red", "blue")
    teach(two, 1, "red", "blue")
    two.ask("red")
    assert two.answer()["task"]["seen"]["visits"] == 0
    remember(one)
    assert two.state["task"] is None
    assert two.answer()["task"]["seen"]["visits"] == 1


def test_strange_requests_are_refused(tab):
    teach(tab, 0, "red")
    assert tab("POST", "/remember").status == 400  # one class
    for asked in ({}, {"action": "drop"}, {"action": "forget", "class": "../../etc/passwd"}):
        assert change(tab, **asked).status == 400
    assert tab.client("POST", "/api/visits/do", b"no json").status == 400


def test_a_run_that_visits_cannot_join_is_refused_before_the_page_opens(memory_run, store):
    with pytest.raises(ConfigError, match="joins gradients of its own memory") as refused:
        Visits(memory_run.trained, store, run=memory_run.root)
    assert "-offsets" in refused.value.hint
    assert not store.exists()


def test_a_store_of_another_run_is_refused(run, pretrained_run, store):
    Visits(run.trained, store, run=run.root)
    with pytest.raises(ConfigError, match="belongs to other weights"):
        Visits(pretrained_run.trained, store, run=pretrained_run.root)
