"""Reports in a real browser, wide and narrow; skipped where there is no Chromium."""

import re
from html import escape

import numpy as np
import pytest
from PIL import Image

from tests.browsing import needs_browser
from tests.report.conftest import answers
from torchemo.report.comparison import write_comparison_report
from torchemo.report.run.collect import compare_runs
from torchemo.report.sheet import sheet

WINDOWS = ((1600, 1200), (400, 900))

pytestmark = [pytest.mark.slow, needs_browser]


def browse(browser, path, *, window=(1600, 1200), shot=None):
    """Open a page in a fresh profile; return its document and what it said on the console."""
    context = browser.new_context(viewport={"width": window[0], "height": window[1]})
    page, console = context.new_page(), []
    page.on("console", lambda message: console.append(message.text))
    page.on("pageerror", lambda error: console.append(str(error)))
    page.goto(path.as_uri())
    if shot is not None:
        page.screenshot(path=shot)
    document = page.content()
    context.close()
    return document, console


@pytest.fixture(params=["points", "pictures", "hostile", "comparison", "sheet"])
def page(request, tmp_path):
    if request.param == "sheet":
        support, query = request.getfixturevalue("folders")
        (tmp_path / "sheet.html").write_text(sheet(answers(), support, query=query))
        return tmp_path / "sheet.html"
    if request.param != "comparison":
        return request.getfixturevalue(request.param) / "report.html"
    runs = [request.getfixturevalue(name) for name in ("base", "points")]
    return write_comparison_report([compare_runs(runs[:1], runs[1:])], tmp_path / "c.html")


@pytest.mark.parametrize("window", WINDOWS)
def test_a_report_opens_without_a_complaint_and_looks_like_something(
    browser, page, window, tmp_path
):
    shot = tmp_path / "shot.png"
    document, console = browse(browser, page, window=window, shot=shot)
    assert console == []
    picture = Image.open(shot).convert("RGB")
    assert picture.size == window
    assert len(np.unique(np.array(picture).reshape(-1, 3), axis=0)) > 100
    assert "<table>" in document
    assert "This file needs no network" in document
    assert document.count("<svg") == page.read_text().count("<svg")


@pytest.mark.parametrize("width", [1600, 400])
def test_a_report_is_never_wider_than_its_window(browser, page, width, tmp_path):
    # In a frame, because a window of its own cannot be that narrow, and pages run no scripts.
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{{}}"></iframe>'
    measure = "f = document.querySelector('iframe').contentDocument.documentElement;"
    measure += " document.title = f.scrollWidth + ' of ' + f.clientWidth"
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<!DOCTYPE html><title></title>" + frame.format(escape(page.read_text()))
        + f'<script>onload = () => {{ {measure} }}</script>'
    )  # fmt: skip
    document, _ = browse(browser, outer, window=(1700, 1000))
    wide, inner = map(int, re.search(r"<title>(\d+) of (\d+)</title>", document).groups())
    assert inner == width
    assert wide <= inner


def test_tables_fit_a_telephone(browser, page, tmp_path):
    measure = "f = document.querySelector('iframe').contentDocument;"
    measure += " document.title = 'tables: ' + [...f.querySelectorAll('.scroll')].map((t) =>"
    measure += " t.scrollWidth - t.clientWidth)"
    outer = tmp_path / "outer.html"
    outer.write_text(
        '<!DOCTYPE html><title></title><iframe style="width: 420px; height: 900px; border: 0"'
        f' srcdoc="{escape(page.read_text())}"></iframe>'
        f"<script>onload = () => {{ {measure} }}</script>"
    )
    document, _ = browse(browser, outer, window=(700, 1000))
    found = re.search(r"<title>tables: ([\d,]*)</title>", document)[1]
    assert not [int(part) for part in found.split(",") if part and int(part)]


def test_the_console_would_tell_of_a_page_that_fetches_or_runs_something(browser, points, tmp_path):
    text = (points / "report.html").read_text()
    for i, bad in enumerate(("<script>alert(1)</script>", '<img src="http://localhost:1/x.png">')):
        copy = tmp_path / f"bad{i}.html"
        copy.write_text(text.replace("</main>", f"{bad}</main>"))
        _, console = browse(browser, copy)
        assert len(console) == 1
        assert "Content Security Policy" in console[0]
