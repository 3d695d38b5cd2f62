"""adapt --remember and the commands of a store, as typed."""

import json

import pytest

from tests.apps.cli.conftest import (
    COLOURS,
    PICTURES,
    colour_picture,
    flip_a_bit,
    run_quietly,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory, colours):
    """MAML, 2-way on plain colours."""
    out = tmp_path_factory.mktemp("remember") / "run"
    run_quietly(
        *("train", "--out", out, "--preset", "maml", "--data", colours, "--options", *PICTURES)
    )
    return out


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def adapt(torchemo, run, store, tmp_path):
    """Visit black and white with images of their own each time."""

    def call(visit, *more, names=("black", "white")):
        support, query = tmp_path / f"support-{visit}", tmp_path / "query"
        for seed, name in enumerate(names):
            (support / name).mkdir(parents=True, exist_ok=True)
            colour = COLOURS["test"].get(name, (200, 90, 10))
            picture = colour_picture(colour, 100 * visit + seed)
            picture.save(support / name / "a.png")
        query.mkdir(exist_ok=True)
        colour_picture(COLOURS["test"]["black"], 7).save(query / "black.png")
        words = ("adapt", run, "--support", support, "--query", query)
        return torchemo(*words, "--remember", store, "--out", tmp_path / "out", *more)

    return call


def test_three_visits_are_said_and_the_answer_without_stands_beside(adapt, store, tmp_path):
    first = adapt(0)
    assert first.code == 0
    assert "Not seen before." in first.out
    assert "without past visits" not in first.out
    assert f"kept in {store}: gradients and class means of this visit, no image" in first.out
    adapt(1)
    third = adapt(2)
    assert "Seen 2 times, last on 20" in third.out
    assert "without past visits" in third.out
    saved = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [one["visits"] for one in saved["seen"]["classes"]] == [2, 2]
    assert saved["without"][0]["file"] == "black.png"
    again = adapt(2, "--json")
    assert again.json["seen"]["words"].startswith("These images are in the store since")
    assert [p["probabilities"] for p in again.json["predictions"]] == [
        p["probabilities"] for p in saved["predictions"]
    ]


def test_a_store_is_listed_renamed_forgotten_exported_and_merged(torchemo, adapt, store, tmp_path):
    for visit in range(3):
        adapt(visit)
    adapt(3, names=("black", "orange"))
    listed = torchemo("memory", "list", store)
    assert listed.code == 0
    for text in ("Classes of", "black", "orange", "4 visits, recognised by names", "MAML at step"):
        assert text in listed.out
    found = torchemo("memory", "list", store, "--json").json
    assert [(c["name"], c["visits"]) for c in found["classes"]] == [
        *[("black", 4), ("orange", 1), ("white", 3)]
    ]
    assert torchemo("memory", "verify", store).out == "4 visits: store is sound\n"
    out = tmp_path / "mine.zip"
    assert "4 visits" in torchemo("memory", "export", store, out).out
    assert torchemo("memory", "list", out, "--json").json == found
    assert torchemo("memory", "rename", store, "black", "noir").out == (
        "black is noir now, in 4 visits\n"
    )
    forgotten = torchemo("memory", "forget", store, "--classes", "orange")
    assert forgotten.out == "forgotten: 1 visit; 2 classes are left\n"
    assert torchemo("memory", "forget", store, "--everything").out.startswith("forgotten: 3 visits")
    assert torchemo("memory", "merge", store, out).out == "added: 4 visits\n"
    assert torchemo("memory", "merge", store, out, store).out == "added: 0 visits\n"
    merged = torchemo("memory", "list", store, "--json").json
    assert merged["classes"] == found["classes"]
    assert [v["id"] for v in merged["visits"]] == [v["id"] for v in found["visits"]]


def test_a_store_is_made_with_settings_of_its_own(torchemo, adapt, run, store):
    made = torchemo(
        *("memory", "create", store, "--of", run, "--capacity", 2, "--controller", "fifo"),
        *("--clip", 1, "--noise", 0.01),
    )
    assert made.code == 0
    for visit in range(3):
        assert adapt(visit).code == 0
    found = torchemo("memory", "list", store, "--json").json
    assert len(found["visits"]) == 2
    assert (found["settings"]["clip"], found["settings"]["noise"]) == (1.0, 0.01)
    assert "clipped to 1 with noise 0.01" in torchemo("memory", "list", store).out
    again = torchemo("memory", "create", store, "--of", run)
    assert (again.code, "is a store already" in again.err) == (2, True)


def test_a_full_store_says_what_it_forgot(torchemo, adapt, run, store):
    torchemo("memory", "create", store, "--of", run, "--capacity", 1)
    adapt(0)
    assert "the full store forgot 1 visit: 20" in adapt(1).out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("list", "nowhere"), 2, "is not a store: there is no such folder"),
        (("forget", "STORE"), 2, "nothing was named that should be forgotten"),
        (("forget", "STORE", "--classes", "blakc"), 2, "knows no class 'blakc'"),
        (("forget", "STORE", "--visits", "zz"), 2, "no visit begins with 'zz'"),
        (("rename", "STORE", "black", "white"), 2, "are two classes of the visit"),
        (("merge", "STORE"), 2, "OTHER"),
        (("show", "STORE"), 2, "is a store, not a run"),
        (("create", "OTHER", "--of", "RUN", "--noise", 1), 2, "noise needs clip"),
        (("create", "OTHER", "--of", "RUN", "--controller", "lur"), 2, "lru"),
        (("create", "RUN", "--of", "RUN"), 2, "is not a store: it holds"),
    ],
)
def test_what_is_typed_wrong_is_said_in_the_words_that_were_typed(
    torchemo, adapt, run, store, words, code, said
):
    adapt(0)
    places = {"STORE": store, "RUN": run, "OTHER": store.with_name("other")}
    found = torchemo("memory", *(places.get(word, word) for word in words))
    assert found.code == code
    assert said in found.err + found.out


def test_a_wrong_query_is_refused_before_anything_is_kept(torchemo, adapt, run, store, tmp_path):
    adapt(0)
    words = ("adapt", run, "--support", tmp_path / "support-0", "--query", tmp_path / "none")
    found = torchemo(*words, "--remember", store.with_name("new"))
    assert (found.code, store.with_name("new").exists()) == (3, False)
    assert torchemo(*words, "--remember", store, "--steps", 3).code != 0


def test_damage_is_refused_and_named(torchemo, adapt, store):
    adapt(0)
    gradients = next((store / "visits").glob("*.gradients.safetensors"))
    flip_a_bit(gradients)
    refused = adapt(1)
    assert refused.code == 4
    assert gradients.name in refused.err
    assert "torchemo memory forget" in refused.err
    assert torchemo("memory", "verify", store).code == 4
    assert torchemo("memory", "verify", store, "--json").json["sound"] is False
    flip_a_bit(store / "store.json")
    assert torchemo("memory", "list", store).code == 4


def test_another_runs_store_is_refused_with_the_reason(torchemo, adapt, store, colours, tmp_path):
    adapt(0)
    other = tmp_path / "other"
    words = ("--data", colours, "--seed", 1, "--options", *PICTURES)
    run_quietly("train", "--out", other, "--preset", "maml", *words)
    support, query = tmp_path / "support-0", tmp_path / "query"
    found = torchemo(*("adapt", other, "--support", support, "--query", query, "--remember", store))
    assert found.code == 2
    assert "belongs to other weights: it was made with MAML at step" in found.err
    assert "A gradient fits only the weights" in found.err


def test_past_visits_help_from_python_too(run, adapt, store, tmp_path):
    import torchemo as package

    adapt(0)
    adapted = package.load(run).adapt(tmp_path / "support-0", remember=store)
    assert adapted.seen.repeated
    answers = adapted.predict(tmp_path / "query")
    assert answers.without is not None
    assert len(answers.predictions) == 1


def test_without_names_the_run_learns_to_recognise_images_first(
    torchemo, adapt, run, store, monkeypatch
):
    from torchemo.runs.visits import recognition

    monkeypatch.setattr(recognition, "USERS", 4)
    monkeypatch.setattr(recognition, "VISITS", 6)
    refused = torchemo("memory", "create", store, "--of", run, "--recognise", "images")
    (kept,) = [path for path in run.iterdir() if path.name == recognition.FILE]
    if refused.code == 0:
        assert f"{run} learns from its data to recognise classes by their images" in refused.out
        assert "Not seen before, as far as images tell." in adapt(0).out
        assert "By their images: " in adapt(1).out
    else:
        assert refused.code == 2
        assert "cannot tell classes apart by their images: recall by images gains" in refused.err
    again = torchemo("memory", "calibrate", run, "--json").json
    assert again["written"] == str(kept)
    assert again["trust"] > 0
    kept.unlink()
