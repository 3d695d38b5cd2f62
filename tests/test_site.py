"""The documentation site: every page is reached, its examples run, and it builds without a warning."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchemo

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "generated" not in page.parts]
LISTED = re.findall(r"^[\w/-]+$", (DOCS / "index.md").read_text(encoding="utf-8"), re.M)


def reference():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_stands_in_the_contents():
    written = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"}
    assert written == {name for name in LISTED if not name.startswith("reference/")}


def test_the_reference_has_every_public_name_once():
    listed = [name for names in reference().GROUPS.values() for name in names]
    assert sorted(listed) == torchemo.__all__


def test_the_reference_of_commands_and_options_follows_the_code():
    pages = reference()
    assert "$ torchemo memory forget --help\nusage: torchemo memory forget" in pages.commands()
    assert "| `inner_lr` |" in pages.options()
    assert "| `maml-emo` |" in pages.presets()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    words = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "-b",
        "html",
        "-d",
        str(tmp_path / "trees"),
    ]
    built = subprocess.run([*words, str(DOCS), str(tmp_path)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "torchemo.for_module" in (tmp_path / "reference/generated/api.html").read_text("utf-8")
