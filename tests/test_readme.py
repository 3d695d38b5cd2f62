"""Everything README and the first guides show runs: Python as it stands, commands with small sizes added."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from torchemo.apps.cli import COMMANDS, main
from torchemo.data.synthetic.pictures import procedural

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs/quickstart.md", ROOT / "docs/your-own-loop.md")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def commands(page):
    lines = "".join(blocks(page, "sh")).splitlines()
    return [line.partition("#")[0].strip() for line in lines]


PYTHON = [(page.name, code) for page in PAGES for code in blocks(page, "python")]
OWN_LOOP = "your-own-loop.md"
"""Its snippets build on each other."""
SMALL = {
    "demo": "--steps 2 --test-tasks 4 --visits 2 --out demo",
    "train": "--steps 2 --size 16 --way 2 --options train.tasks=2 train.validation_tasks=2"
    " data.n_query=2 model.filters=4 memory.capacity=4",
    "eval": "--tasks 4",
}
"""What keeps a command of the README short."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that README's commands name."""
    monkeypatch.chdir(tmp_path)
    index = procedural(image_size=16, classes_per_family=4)
    for name, image in zip(index.label.tolist(), index.images, strict=True):
        place = tmp_path / "birds" / f"class{name}"
        place.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image.transpose(1, 2, 0))
        picture.save(place / f"{len(list(place.iterdir()))}.png")
    return tmp_path


def test_readme_has_snippets_of_both_kinds():
    assert len(blocks(README, "python")) >= 2
    assert {line.split()[1] for line in commands(README) if line.startswith("torchemo")} >= {
        "demo",
        "train",
        "adapt",
    }


@pytest.mark.parametrize(
    ("page", "code"),
    [(page, code) for page, code in PYTHON if page != OWN_LOOP]
    + [(OWN_LOOP, "\n".join(code for page, code in PYTHON if page == OWN_LOOP))],
    ids=lambda text: text.strip().splitlines()[-1][:40],
)
def test_python_runs_as_it_stands(page, code, folder):
    exec(compile(code, page, "exec"), {"__name__": "guide"})


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_commands_run_in_their_order(page, folder):
    shutil.make_archive("birds", "zip", folder / "birds")
    for side in ("support", "query"):
        for name in ("class0", "class1"):
            shutil.copytree(folder / "birds" / name, folder / "mine" / side / name)
    for line in commands(page):
        program, command, *words = shlex.split(line)
        if program == "pip":
            assert line == "pip install ."
            continue
        assert (program, command in COMMANDS) == ("torchemo", True)
        with pytest.raises(SystemExit) as left:
            main([command, *words, *small(command, words)])
        assert left.value.code == 0, line


def small(command, words):
    """Return what keeps a command short, without options of a memory where there is none."""
    bare = "maml" in words
    return [w for w in SMALL.get(command, "").split() if not (bare and w.startswith("memory."))]
