"""The documents read easily: short sentences, short paragraphs, and the words of the field."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRITTEN = (page for page in ROOT.glob("docs/**/*.md") if "generated" not in page.parts)
PAGES = sorted((*WRITTEN, *(ROOT / n for n in ("README.md", "CONTRIBUTING.md"))))
LONGEST, MOST_SENTENCES = 25, 5
FORBIDDEN = {
    r"pictures?": "images",
    r"shown": "significant",
    r"keeps? silent|silent|silence": "skips recall",
    r"by heart": "overfits, memorises",
    r"worlds?": "datasets, task sets",
    r"doubted": "failed validation",
    r"stranger's loop": "your own training loop",
    r"literal|mended": "paper, repaired",
    r"fresh tests?": "a confirmation on new seeds and test tasks",
}
"""Words of our own, and what the field says instead."""


def prose(page):
    """Paragraphs and list items of a page, without code, tables, comments and headings."""
    text = re.sub(r"^```.*?^```", "\n", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"^(\|.*|    .*|#.*|!\[.*|\[[\w.-]+\]\([^)]*\)(: `.*`)?)$", "", text, flags=re.M)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n| ·\s", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def plain(paragraph):
    """Text as it is read: links are their words, code is one word, intervals belong to their number."""
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
    text = re.sub(r"`[^`]+`", "Code", text)
    text = re.sub(r" ?\[[-−+\d., %]+\]", "", text)
    return text.replace("*", "")


def sentences(paragraph):
    parts = re.split(r"(?<=[.!?])[)”\"]?\s+(?=[A-Z\d“\"(]|torchemo)", plain(paragraph))
    return [part for part in parts if re.search(r"\w", part)]


def words(sentence):
    return [word for word in sentence.split() if re.search(r"\w", word)]


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_sentences_and_paragraphs_are_short(path):
    paragraphs = prose(path.read_text(encoding="utf-8"))
    long = [s for p in paragraphs for s in sentences(p) if len(words(s)) > LONGEST]
    assert not long
    assert not [p for p in paragraphs if len(sentences(p)) > MOST_SENTENCES]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_use_the_words_of_the_field(path):
    if path.name != "glossary.md":
        text = "\n".join(plain(p) for p in prose(path.read_text(encoding="utf-8")))
        assert {w: f"write {n}" for w in FORBIDDEN if (n := used(FORBIDDEN, w, text))} == {}


def used(forbidden, word, text):
    """What to write instead of a forbidden word that a text has; None if it has not."""
    return forbidden[word] if re.search(rf"\b({word})\b", text, re.IGNORECASE) else None


IN_CODE = [
    r"pictures?",
    r"by heart",
    r"keeps? silent",
    r"doubted",
    r"worlds?",
    "mended",
]
IDENTIFIERS = r"(?m)^ *\w+:|``?[^`]+``?|\b\w*[_.]\w+|['\"][^'\"\s]*['\"]"
"""What a sentence names and does not say: code, dotted names, and words that are data."""


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=name)
def test_docstrings_and_messages_use_the_words_of_the_field(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
    said = [
        re.sub(IDENTIFIERS, " ", text) for text in texts if isinstance(text, str) and " " in text
    ]
    assert {
        w for w in IN_CODE for text in said if re.search(rf"\b({w})\b", text, re.IGNORECASE)
    } == set()


def test_the_reader_of_prose_sees_what_a_person_reads():
    page = "# T\n\nOne two [a b](x.md). `a b` is\ncode.\n\n| a |\n\n- x [+1.0, +2.0] y\n- z\n\n```\nno\n```\n"
    assert prose(page) == ["One two [a b](x.md). `a b` is code.", "x [+1.0, +2.0] y", "z"]
    assert sentences(prose(page)[0]) == ["One two a b.", "Code is code."]
    assert words(plain("x [+1.0, +2.0] – y")) == ["x", "y"]
    assert used(FORBIDDEN, "pictures?", "A Picture.") == "images"
