"""Reports in a real browser, wide and narrow; skipped where there is no Chromium."""

import re
import shutil
import subprocess
from html import escape

import numpy as np
import pytest
from PIL import Image

from tests.report.conftest import answers
from torchemo.report.comparison import write_comparison_report
from torchemo.report.run.collect import compare_runs
from torchemo.report.sheet import sheet

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip
WINDOWS = ((1600, 1200), (400, 900))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


def browse(page, profile, *options, window=(1600, 1200)):
    """Open a page in a fresh profile; return its document and what it said on the console."""
    profile.mkdir()
    size = f"--window-size={window[0]},{window[1]}"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", size, *options, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


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
def test_a_report_opens_without_a_complaint_and_looks_like_something(page, window, tmp_path):
    shot = tmp_path / "shot.png"
    _, console = browse(page, tmp_path / "a", f"--screenshot={shot}", window=window)
    assert console == []
    picture = Image.open(shot).convert("RGB")
    assert picture.size == window
    assert len(np.unique(np.array(picture).reshape(-1, 3), axis=0)) > 100
    document, console = browse(page, tmp_path / "b", "--dump-dom", window=window)
    assert console == []
    assert "<table>" in document
    assert "This file needs no network" in document
    assert document.count("<svg") == page.read_text().count("<svg")


@pytest.mark.parametrize("width", [1600, 400])
def test_a_report_is_never_wider_than_its_window(page, width, tmp_path):
    # In a frame, because a window of its own cannot be that narrow, and pages run no scripts.
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{{}}"></iframe>'
    measure = "f = document.querySelector('iframe').contentDocument.documentElement;"
    measure += " document.title = f.scrollWidth + ' of ' + f.clientWidth"
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<!DOCTYPE html><title></title>" + frame.format(escape(page.read_text()))
        + f'<script>onload = () => {{ {measure} }}</script>'
    )  # fmt: skip
    document, _ = browse(outer, tmp_path / "profile", "--dump-dom", window=(1700, 1000))
    wide, inner = map(int, re.search(r"<title>(\d+) of (\d+)</title>", document).groups())
    assert inner == width
    assert wide <= inner


def test_tables_fit_a_telephone(page, tmp_path):
    measure = "f = document.querySelector('iframe').contentDocument;"
    measure += " document.title = 'tables: ' + [...f.querySelectorAll('.scroll')].map((t) =>"
    measure += " t.scrollWidth - t.clientWidth)"
    outer = tmp_path / "outer.html"
    outer.write_text(
        '<!DOCTYPE html><title></title><iframe style="width: 420px; height: 900px; border: 0"'
        f' srcdoc="{escape(page.read_text())}"></iframe>'
        f"<script>onload = () => {{ {measure} }}</script>"
    )
    document, _ = browse(outer, tmp_path / "profile", "--dump-dom", window=(700, 1000))
    found = re.search(r"<title>tables: ([\d,]*)</title>", document)[1]
    assert not [int(part) for part in found.split(",") if part and int(part)]


def test_the_console_would_tell_of_a_page_that_fetches_or_runs_something(points, tmp_path):
    text = (points / "report.html").read_text()
    for i, bad in enumerate(("<script>alert(1)</script>", '<img src="http://localhost:1/x.png">')):
        copy = tmp_path / f"bad{i}.html"
        copy.write_text(text.replace("</main>", f"{bad}</main>"))
        _, console = browse(copy, tmp_path / f"profile{i}", "--dump-dom")
        assert len(console) == 1
        assert "Content Security Policy" in console[0]
