"""The sheet of adapt: every image once, how sure an answer is, and no name that is obeyed."""

import re
from dataclasses import replace

from tests.report.conftest import answers
from tests.report.html import broken_laws
from torchemo.report.format import breakable
from torchemo.report.sheet import MAX_SHOWN, sheet


def test_every_picture_is_inside_and_every_name_is_only_a_name(folders):
    page = sheet(answers(), folders[0], query=folders[1])
    for hostile in ("<b onload", "<img src=x>", "<i>stones"):
        assert hostile not in page
    assert "&lt;i&gt;stones" in page
    assert "not remembered" in page
    assert page.count('src="data:image/jpeg;base64,') == 2 + 2 + MAX_SHOWN
    assert "and 2 more" in page
    assert broken_laws(page) == []


def test_a_bar_is_as_long_as_the_answer_is_sure_and_marks_what_guessing_gives(folders):
    page = sheet(answers(recalled=()), folders[0], query=folders[1])
    assert re.findall(r"<i style=\"width: ([\d.]+)%\"></i><u style=\"left: ([\d.]+)%\">", page) == [
        ("75.0", "50.0"),
        ("50.0", "50.0"),
    ]
    assert "meta-trained for 1,200 steps" in page
    assert "Nothing: this run has no memory" in page


def test_nothing_recalled_is_explained(folders):
    found = replace(answers(recalled=()), remembers=True)
    for told, words in (
        (found, "Nothing: the memory has not remembered anything yet"),
        (replace(found, familiar=False), "unlike the tasks of training"),
        (replace(found, helpful=False), "the slots for such tasks failed validation"),
    ):
        page = sheet(told, folders[0], query=folders[1])
        assert words in page
        assert "this run has no memory" not in page


def test_lines_may_be_broken_after_underscores_only():
    assert breakable("<a_b>c") == "&lt;a_<wbr>b&gt;c"
