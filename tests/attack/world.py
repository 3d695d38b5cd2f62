"""The sound things that cases damage: an image set and two small runs, made once."""

import shutil
from pathlib import Path

from tests.apps.cli.conftest import COLOURS, MEMORY, PICTURES, POINTS, colour_picture, write_colours
from tests.attack.harness import command


def make_world(root: Path) -> Path:
    """Make ``images``, runs with a memory (``points``, ``pictures``), one
    without (``plain``), and a ``store`` of two visits."""
    write_colours(root / "images")
    paper = ("--preset", "maml-emo-paper")
    command("train", "--out", root / "points", *paper, *POINTS, *MEMORY, codes={0})
    command("eval", root / "points", "--tasks", 4, codes={0})
    data = ("--data", root / "images")
    command("train", "--out", root / "pictures", *paper, *data, "--options", *PICTURES, *MEMORY,
            codes={0})  # fmt: skip
    command("train", "--out", root / "plain", "--preset", "maml", *data, "--options", *PICTURES,
            codes={0})  # fmt: skip
    for number in range(2):
        visit = ("--support", root / "visit", "--query", root / "visit" / "black")
        write_visit(root / "visit", number)
        command("adapt", root / "plain", *visit, "--remember", root / "store",
                "--out", root / "answers", codes={0})  # fmt: skip
    return root


def write_visit(folder: Path, number: int) -> None:
    """Write one image of each of two classes, other ones for every number."""
    for place, name in enumerate(("black", "white")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        colour_picture(COLOURS["test"][name], 2 * number + place).save(folder / name / "a.png")


def copy_of(world: Path, name: str, place: Path) -> Path:
    """Copy one of the runs to where a case may damage it."""
    return Path(shutil.copytree(world / name, place / name))
