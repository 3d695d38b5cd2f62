"""Everything README shows runs: Python as it stands, commands with small sizes added."""

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from torchemo.apps.cli import COMMANDS, main
from torchemo.data.synthetic.pictures import procedural

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [
    line.partition("#")[0].strip()
    for language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
]
SMALL = {
    "demo": "--steps 2 --test-tasks 4 --out demo",
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
    assert len(PYTHON) >= 2
    assert {line.split()[1] for line in SHELL if line.startswith("torchemo")} >= {
        "demo",
        "train",
        "adapt",
    }


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python_runs_as_it_stands(code, folder):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_commands_run_in_their_order(folder):
    import shutil

    shutil.make_archive("birds", "zip", folder / "birds")
    for side in ("support", "query"):
        for name in ("class0", "class1"):
            shutil.copytree(folder / "birds" / name, folder / "mine" / side / name)
    for line in SHELL:
        program, command, *words = shlex.split(line)
        if program == "pip":
            assert line == "pip install ."
            continue
        assert (program, command in COMMANDS) == ("torchemo", True)
        with pytest.raises(SystemExit) as left:
            main([command, *words, *SMALL.get(command, "").split()])
        assert left.value.code == 0, line
