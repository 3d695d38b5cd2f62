"""The page in a real browser: teach, ask, take back, hostile names, huge images, a lost server, two tabs."""

import os
import random
import re
import signal
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from PIL import Image

from tests.apps.web.conftest import COLOURS, image
from tests.browsing import needs_browser

FIVE = ("red", "blue", "green", "black", "white")

pytestmark = pytest.mark.slow


class Server:
    """``torchemo serve`` in a process of its own."""

    def __init__(self, warm, run, *more):
        self._process = warm.start("serve", run.root, *more)
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/\S+\s", self._process.said()[0])):
            assert self._process.poll() is None, self._process.said()
            time.sleep(0.05)
        self.url = found[0].strip()

    def end(self):
        """Stop it; return what it complained of."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
        return self._process.wait().stderr


@pytest.fixture
def server(run, warm):
    made = Server(warm, run)
    yield made
    assert "Traceback" not in made.end()


@pytest.fixture
def files(tmp_path):
    """Two images of each colour to teach, and one to ask."""
    for name in COLOURS:
        for i in range(3):
            (tmp_path / f"{name}{i}.png").write_bytes(image(name, i))
    return tmp_path


def opened(browser, server, *, width=1400):
    """Open the page in a tab of its own; what it complains of is collected."""
    page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.listens = lambda dialog: page.complaints.append(dialog.message)
    page.on("dialog", page.listens)
    page.goto(server.url)
    page.locator(".box").nth(1).wait_for()
    return page


def expect(locator, count):
    from playwright.sync_api import expect as expected

    expected(locator).to_have_count(count, timeout=20_000)


def teach(page, names, files):
    for name in names:
        boxes = page.locator(".box")
        empty = page.locator(".box:not(:has(img))")
        if empty.count() == 0:
            page.click("#add-class")
            expect(page.locator(".box:not(:has(img))"), 1)
        number = next(i for i in range(boxes.count()) if not boxes.nth(i).locator("img").count())
        box = boxes.nth(number)
        box.locator("input[type=text]").fill(name)
        box.locator("input[type=text]").press("Tab")
        box.locator("input[type=file]").set_input_files(
            [files / f"{name}{i}.png" for i in range(2)]
        )
        expect(box.locator("img"), 2)
        page.locator("#cancel").wait_for(state="hidden")


def ask(page, paths, *, count):
    page.set_input_files("#query-files", paths)
    expect(page.locator(".card"), count)
    page.locator("#cancel").wait_for(state="hidden")
    page.click("#answer")
    expect(page.locator(".answer"), count)


@needs_browser
@pytest.mark.parametrize("width", [1400, 400])
def test_five_classes_a_sixth_answers_and_taking_back(browser, server, files, width):
    page = opened(browser, server, width=width)
    teach(page, FIVE, files)
    ask(page, [files / "red2.png", files / "blue2.png"], count=2)
    before = page.locator(".answer").all_inner_texts()
    teach(page, ["yellow"], files)
    expect(page.locator(".answer"), 0)
    page.click("#answer")
    expect(page.locator(".answer"), 2)
    for _ in range(4):  # two images, the name, the box
        page.click("#undo")
        page.wait_for_timeout(150)
    expect(page.locator(".box"), 5)
    assert page.locator(".answer").all_inner_texts() == before
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.complaints == []


@needs_browser
def test_hostile_names_stay_names(browser, server, files):
    page = opened(browser, server)
    teach(page, ["red", "blue"], files)
    bad = "<script>alert(1)<\u2215script><img src=x onerror=alert(2)>"
    page.locator(".box input[type=text]").first.fill(bad)
    page.locator(".box input[type=text]").first.press("Tab")
    hostile = files / "<img src=x onerror=alert(3)>.png"
    hostile.write_bytes(image("red", 9))
    ask(page, [hostile], count=1)
    assert bad in page.locator(".bars").inner_text()
    assert page.locator("main script, main img[src=x]").count() == 0
    assert page.complaints == []


@needs_browser
def test_a_late_reply_hides_nothing_that_came_after_it(browser, server, files):
    page = opened(browser, server)
    teach(page, ["red", "blue"], files)
    held = []

    def hold_renames(route):
        if "rename" in (route.request.post_data or ""):
            held.append((route, route.fetch()))
        else:
            route.continue_()

    page.route("**/do", hold_renames)
    page.locator(".box input[type=text]").first.fill("crimson")
    page.locator(".box input[type=text]").first.press("Tab")
    while not held:  # the server has answered, the page does not know it yet
        page.wait_for_timeout(20)
    page.set_input_files("#query-files", [files / "red2.png"])
    expect(page.locator(".card"), 1)
    page.locator("#cancel").wait_for(state="hidden")
    route, reply = held.pop()
    with page.expect_response("**/do"):
        route.fulfill(response=reply)
    page.wait_for_timeout(300)
    expect(page.locator(".card"), 1)
    page.click("#answer")
    expect(page.locator(".answer"), 1)
    assert "crimson" in page.locator(".bars").inner_text()
    assert page.complaints == []


@needs_browser
def test_an_image_of_10000_pixels_a_side_does_not_stop_the_page(browser, server, files):
    page = opened(browser, server)
    teach(page, ["red", "blue"], files)
    Image.fromarray(np.zeros((10_000, 10_000), np.uint8)).save(files / "huge.png")
    page.set_input_files("#query-files", [files / "huge.png", files / "red2.png"])
    page.locator(".card:has-text('red2.png')").wait_for()
    page.locator("#cancel").wait_for(state="hidden")
    page.wait_for_timeout(300)
    listed = page.locator("#message").inner_text() + page.locator("#queries").inner_text()
    assert "huge.png" in listed  # refused by name, or taken
    page.click("#answer")
    page.locator(".answer").first.wait_for()
    assert page.complaints == []


@needs_browser
@pytest.mark.parametrize("width", [1400, 400])
def test_three_visits_are_kept_said_renamed_and_forgotten(
    warm, browser, run, files, tmp_path, width
):
    server = Server(warm, run, "--remember", str(tmp_path / "store"))
    page = opened(browser, server, width=width)
    said = []
    for visit in range(3):
        if visit:
            page.click("#clear")
            expect(page.locator(".box"), 0)
        for name in ("red", "blue"):
            for i in range(2):  # new images each time
                (files / f"{name}{i}.png").write_bytes(image(name, 10 * visit + i))
        teach(page, ["red", "blue"], files)
        ask(page, [files / "red2.png"], count=1)
        said.append(page.locator("#seen").inner_text().split(",")[0])
        page.click("#remember")
        page.locator("#remember-status:has-text('is in the store')").wait_for()
        assert page.locator("#remember").is_disabled()
    assert said == ["Not seen before.", "Seen once", "Seen 2 times"]
    assert page.locator(".sides").inner_text().count("past visits") == 2
    expect(page.locator("#known li"), 2)
    field = page.locator("#known input").nth(1)
    field.fill("<b>rouge</b>")
    field.press("Tab")
    page.locator("#known li:has-text('seen 3 times')").nth(1).wait_for()
    expect(page.locator("#known b"), 0)
    page.remove_listener("dialog", page.listens)
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#known button").first.click()
    expect(page.locator("#known li"), 0)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.complaints == []
    assert "Traceback" not in server.end()
    assert list((tmp_path / "store" / "visits").iterdir()) == []


@needs_browser
def test_two_tabs_have_boards_of_their_own_and_a_tab_survives_a_reload(browser, server, files):
    one, two = opened(browser, server), opened(browser, server)
    teach(one, ["red", "blue"], files)
    expect(two.locator(".box img"), 0)
    one.reload()
    expect(one.locator(".box img"), 4)


@needs_browser
def test_a_lost_server_is_told_of(warm, browser, run):
    server = Server(warm, run)
    page = opened(browser, server)
    server.end()
    page.click("#add-class")
    page.locator("#message:has-text('does not answer')").wait_for()
    assert page.complaints == []


def test_1000_random_requests_leave_no_traceback(server):
    draw = random.Random(0)
    root, base = server.url, server.url.rsplit("/", 2)[0] + "/"
    with urllib.request.urlopen(
        urllib.request.Request(root + "api/sessions", method="POST"), timeout=20
    ) as reply:
        session = re.search(r':"([^"]+)"', reply.read().decode())[1]
    ends = (
        "", "/do", "/images", "/open", "/save", "/answers.csv", "/answers.json", "/answers.x",
        "/images/a", "/images?box=1", "/images?name=%00%ff", "/do/do",
    )  # fmt: skip
    starts = ("add_class", "rename", "undo", "clear", "answer", "cancel", "remove_image", "nothing")
    codes = {200}
    for _ in range(1000):
        place = draw.choice((f"{root}api/sessions/{session}", f"{root}api/sessions/x", root, base))
        action = (
            f'{{"action": "{draw.choice(starts)}", "name": {draw.choice(("1", "null", "[]"))}}}'
        )
        body = draw.choice((b"", draw.randbytes(300), action.encode(), b"[" * 9000, image("red")))
        request = urllib.request.Request(
            place + draw.choice(ends), body, method=draw.choice(("GET", "POST", "PUT", "DELETE"))
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                assert reply.status == 200
        except urllib.error.HTTPError as error:
            codes.add(error.code)
            error.close()
    assert max(codes) < 500
    with urllib.request.urlopen(f"{root}api/sessions/{session}", timeout=20) as reply:
        assert reply.status == 200


@needs_browser
@pytest.mark.parametrize("skipped", [False, True])
def test_both_answers_are_shown_where_memory_was_used(warm, browser, memory_run, files, skipped):
    server = Server(warm, memory_run)
    try:
        page = opened(browser, server, width=400)

        def recalls_nothing(route):
            reply = route.fetch()
            body = reply.json()
            if body.get("task"):
                body["task"]["recalled"] = []
            route.fulfill(response=reply, json=body)

        if skipped:
            page.route(re.compile(r"/api/sessions/[^/]+(/do)?$"), recalls_nothing)
        teach(page, ["red", "blue"], files)
        box = page.locator(".box input[type=text]").first
        box.fill("a_name_of-many.parts_and_then_some_more")
        box.press("Tab")
        ask(page, [files / "red2.png"], count=1)
        expect(page.locator(".sides"), 0 if skipped else 1)
        answer = page.locator(".card .answer")
        assert answer.inner_text() in ("a_name_of-many.parts_and_then_some_more", "blue")
        assert page.locator("#save").bounding_box()["height"] < 50
        assert page.locator("#undo").bounding_box()["height"] < 50
        assert not page.complaints
    finally:
        complaints = server.end()
    assert "Traceback" not in complaints
