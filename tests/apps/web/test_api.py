"""The page's routes: teach, ask, take back, save, open; limits and strangers."""

import csv
import io
import json
import zipfile

import numpy as np
import pytest
from PIL import Image

from tests.apps.web.conftest import Tab, image
from torchemo.apps.cli import main


def test_five_classes_and_a_sixth_are_taught_and_asked(tab):
    five = ("red", "blue", "green", "black", "white")
    tab.teach(*five)
    tab.ask("red", "blue")
    found = tab.answer()
    assert found["task"]["classes"] == sorted(five)
    tab.teach("yellow")
    assert tab.state["task"] is None  # the answers belonged to five classes
    tab.ask("yellow")
    found = tab.answer()
    assert [len(q["answer"]["probabilities"]) for q in found["queries"]] == [6, 6, 6]
    for query in found["queries"]:
        assert sum(query["answer"]["probabilities"]) == pytest.approx(1, abs=1e-5)


FIVE = ("red", "blue", "green", "black", "white")


def adapted(run, support, query, capsys, *, out):
    """Return the probabilities that the command prints for each file."""
    arguments = [
        "adapt",
        str(run.root),
        "--support",
        str(support),
        "--query",
        str(query),
    ]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--out", str(out), "--json"])
    found = json.loads(capsys.readouterr().out)["predictions"]
    return {p["file"]: list(p["probabilities"].values()) for p in found}


@pytest.mark.parametrize("kind", ["run", "memory_run", "pretrained_run"])
def test_answers_are_those_of_adapt_on_a_folder_and_on_each_file(
    serve, kind, request, tmp_path, capsys
):
    run = request.getfixturevalue(kind)
    tab = Tab(serve(run))
    tab.teach(*FIVE)
    tab.ask(*FIVE, *FIVE, *FIVE)
    found = tab.answer()
    assert found["job"]["error"] is None
    for name in FIVE:
        (tmp_path / "support" / name).mkdir(parents=True)
        for i in range(2):
            (tmp_path / "support" / name / f"{i}.png").write_bytes(image(name, i))
    (tmp_path / "query").mkdir()
    for i, name in enumerate(FIVE * 3):
        (tmp_path / "query" / f"{name}-{i}.png").write_bytes(image(name, 50 + i))
    folders = (run, tmp_path / "support", tmp_path / "query")
    together = adapted(*folders, capsys, out=tmp_path / "out")
    assert len(found["queries"]) == len(together) == 15
    for query in found["queries"]:
        file, answer = query["name"], query["answer"]["probabilities"]
        alone = adapted(*folders[:2], folders[2] / file, capsys, out=tmp_path / "out")
        (one,) = alone.values()
        assert answer == pytest.approx(one, abs=1e-5)
        assert answer == pytest.approx(together[file], abs=1e-5)


def test_the_nearest_support_image_is_the_query_itself_if_it_is_there(tab):
    tab.teach("red", "blue", "green")
    tab("POST", "/images?name=known.png", image("blue", 1))
    (query,) = tab.answer()["queries"]
    first = query["answer"]["nearest"][0]
    blue = next(box for box in tab.state["boxes"] if box["name"] == "blue")
    assert first["image"] == blue["images"][1]["key"]
    assert first["similarity"] == pytest.approx(1, abs=1e-4)


def test_a_change_is_taken_back_and_its_answers_return(tab):
    tab.teach("red", "blue")
    tab.ask("red")
    before = tab.answer()
    tab.teach("green", shots=1)
    assert tab.state["queries"][0]["answer"] is None
    tab.act("undo")
    tab.act("undo")
    after = tab.state
    assert after["boxes"] == before["boxes"]
    assert after["queries"] == before["queries"]
    tab.act("clear")
    assert tab.state["boxes"] == tab.state["queries"] == []
    assert tab.act("undo").json["boxes"] == before["boxes"]


def test_nothing_is_taken_back_twice(tab):
    tab.act("add_class")
    assert tab.act("undo").status == 200
    refused = tab.act("undo")
    assert refused.status == 400
    assert "nothing to take back" in refused.json["error"]


def test_a_session_is_saved_and_opened_with_the_same_answers(tab):
    tab.teach("red", "blue", "green")
    tab.act("rename", key=tab.state["boxes"][0]["key"], name="<script>alert(1)</script>"[:8])
    tab.ask("red", "red")
    first = tab.answer()
    saved = tab("GET", "/save")
    assert saved.headers["content-type"] == "application/zip"
    names = zipfile.ZipFile(io.BytesIO(saved.body)).namelist()
    assert "support/<script>/0.png" in names
    assert "query/red-0.png" in names
    other = Tab(tab.client)
    assert other("POST", "/open", saved.body).status == 200
    again = other.answer()
    assert again["task"]["classes"] == first["task"]["classes"]
    for one, two in zip(first["queries"], again["queries"], strict=True):
        assert two["answer"]["probabilities"] == pytest.approx(
            one["answer"]["probabilities"], abs=1e-6
        )


def test_adapt_takes_a_saved_session(serve, run, tmp_path, capsys):
    tab = Tab(serve(run))
    tab.teach(*FIVE)
    tab.ask("red", "blue", "red")
    answers = [q["answer"]["probabilities"] for q in tab.answer()["queries"]]
    (tmp_path / "session.zip").write_bytes(tab("GET", "/save").body)
    folder = tmp_path / "session.zip"
    found = adapted(run, folder, folder, capsys, out=tmp_path / "out")
    assert list(found) == ["red-0.png", "blue-1.png", "red-2.png"]
    for one, other in zip(found.values(), answers, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize(
    "names", [["../x.png"], ["a.png"], ["support/a/b/c.png"], [], ["query/a.png"]]
)
def test_another_zip_is_refused_and_changes_nothing(tab, names):
    tab.teach("red", "blue")
    before = tab.state["boxes"]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, b"no image")
    assert tab("POST", "/open", stream.getvalue()).status == 400
    assert tab("POST", "/open", b"no zip").status == 400
    assert tab.state["boxes"] == before


def test_answers_are_downloaded_and_no_name_is_a_formula(tab):
    tab.teach("red", "blue")
    tab.act("rename", key=tab.state["boxes"][0]["key"], name="=1+1")
    tab.ask("blue")
    tab.answer()
    rows = list(csv.reader(io.StringIO(tab("GET", "/answers.csv").body.decode())))
    assert rows[0] == ["file", "predicted", "probability", "'=1+1", "blue"]
    assert sum(map(float, rows[1][3:])) == pytest.approx(1, abs=1e-4)
    found = tab("GET", "/answers.json").json
    assert found["classes"] == {"=1+1": 2, "blue": 2}
    assert found["predictions"][0]["file"] == "blue-0.png"
    assert tab("GET", "/answers.exe").status == 404


@pytest.mark.parametrize(
    "name", ["", " ", "a/b", "..", ".hidden", "a\\b", "a\nb", "x" * 81, "blue"]
)
def test_names_that_no_folder_can_have_are_refused(tab, name):
    tab.teach("red", "blue", shots=1)
    key = tab.state["boxes"][0]["key"]
    assert tab.act("rename", key=key, name=name).status == 400
    assert tab.state["boxes"][0]["name"] == "red"


def test_bad_files_are_refused_by_name_and_the_rest_goes_on(tab):
    tab.teach("red", "blue")
    for body in (b"", b"text", image("red")[:60]):
        refused = tab("POST", "/images?name=../../etc/bad.png", body)
        assert refused.status == 400
        assert refused.json["error"].startswith("bad.png: ")
    tab.ask("red")
    assert len(tab.answer()["queries"]) == 1


def test_limits_are_kept(serve, run):
    tab = Tab(serve(run, classes=2, support=3, queries=1, image_bytes=5000))
    tab.teach("red", "blue", shots=1)
    assert tab.act("add_class").status == 413
    key = tab.state["boxes"][0]["key"]
    assert tab("POST", f"/images?box={key}", image("red")).status == 200
    assert tab("POST", f"/images?box={key}", image("red")).status == 413
    assert tab("POST", "/images", bytes(5001)).status == 413
    assert tab("POST", "/images", image("red")).status == 200
    assert tab("POST", "/images", image("red")).status == 413
    assert "at most 1 queries" in tab("POST", "/images", image("red")).json["error"]


def test_old_sessions_give_way(serve, run):
    client = serve(run, sessions=2)
    tabs = [Tab(client) for _ in range(3)]
    assert [tab("GET").status for tab in tabs] == [404, 200, 200]


def test_tabs_do_not_see_each_other(serve, run):
    client = serve(run)
    one, two = Tab(client), Tab(client)
    one.teach("red", "blue", shots=1)
    assert two.state["boxes"] == []
    picture = one.state["boxes"][0]["images"][0]["key"]
    assert one("GET", f"/images/{picture}").status == 200
    assert two("GET", f"/images/{picture}").status == 404


def test_a_board_does_not_change_while_it_is_answered(tab):
    tab.teach("red", "blue")
    tab.ask("red")
    session = tab.client.app.state.sessions.find(tab.key)
    tab.answer()
    session.job.running = True
    assert tab.act("clear").status == 400
    assert tab.act("cancel").status == 200
    assert session.job.cancelled


def test_a_large_photograph_is_taken(tab):
    stream = io.BytesIO()
    Image.fromarray(np.zeros((4000, 5000, 3), np.uint8)).save(stream, "JPEG")
    assert tab("POST", "/images?name=large.jpg", stream.getvalue()).status == 200
    key = tab.state["queries"][0]["key"]
    small = Image.open(io.BytesIO(tab("GET", f"/images/{key}").body))
    assert max(small.size) <= 160


def test_nothing_is_there_without_the_token_or_for_other_hosts(tab):
    ask = tab.client
    for prefix in ("", "/wrong", "/a-token-and-more", "/A-TOKEN"):
        assert ask("GET", "/", prefix=prefix).status == 404
        assert ask("POST", "/api/sessions", prefix=prefix).status == 404
    assert ask("GET", "/", host=b"evil.example").status == 400
    for path in ("/../../etc/passwd", "/static/../app.py", "/page.py", "/%2e%2e/app.py"):
        assert ask("GET", path).status == 404


def test_every_answer_forbids_scripts_from_elsewhere(tab):
    for reply in (tab.client("GET", "/"), tab("GET"), tab.client("GET", "/", prefix="/no")):
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_page_loads_nothing_from_elsewhere(tab):
    for path in (
        "/",
        "/page.js",
        "/page.css",
        "/boxes.js",
        "/server.js",
        "/element.js",
        "/answers.js",
    ):
        reply = tab.client("GET", path)
        assert reply.status == 200
        assert b"https:" not in reply.body
        assert b"innerHTML" not in reply.body


def test_with_a_memory_both_answers_and_what_was_recalled_are_told(serve, memory_run):
    tab = Tab(serve(memory_run))
    tab.teach("red", "blue", "green", "black", "white", shots=1)
    tab.ask("red")
    found = tab.answer()
    assert found["job"]["error"] is None
    (query,) = found["queries"]
    assert len(query["answer"]["without"]) == 5
    assert len(found["task"]["recalled"]) == 3
    assert found["task"]["memory"].startswith("3 remembered tasks were recalled")
    without = tab("GET", "/answers.json").json["predictions"][0]["without_memory"]
    assert list(without.values()) == query["answer"]["without"]
