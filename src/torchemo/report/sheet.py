"""The sheet of ``torchemo adapt``: every query image, what it was taken for, and how sure that is."""

import base64
import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from torchemo.data.formats.images import PictureForm, decode
from torchemo.data.listing import Picture
from torchemo.report.page import render
from torchemo.runs.adapt import Answers, query_pictures, support_classes

SIDE = 128
"""Side of an image on the sheet, in pixels; all of them are squeezed to it, as the network sees them."""

MAX_SHOWN = 12
"""Support images shown per class."""


class SupportRow(NamedTuple):
    """A class of the support folder: its name, some of its images, and how many more there are."""

    name: str
    pictures: list[str]
    more: int


def sheet(answers: Answers, support: Path, *, query: Path) -> str:
    """Show answers as one self-contained HTML page; images are inline and every name is escaped."""
    bad = {one.name for one in answers.left_out}
    held = {c.name: [p for p in c.pictures if p.name not in bad] for c in support_classes(support)}
    rows = [
        SupportRow(
            name,
            [_thumbnail(picture) for picture in pictures[:MAX_SHOWN]],
            max(0, len(pictures) - MAX_SHOWN),
        )
        for name, pictures in held.items()
    ]
    queries = query_pictures(query)
    return render(
        "sheet.html.j2",
        title=f"{len(answers.predictions)} images sorted into {len(answers.classes)} classes",
        answers=answers,
        chance=1 / len(answers.classes),
        support=rows,
        thumbnails={p.file: _thumbnail(queries[p.file]) for p in answers.predictions},
        side=SIDE,
    )


def _thumbnail(picture: Picture) -> str:
    pixels = decode(picture.read(), PictureForm(SIDE, SIDE), name=picture.name)
    stream = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(stream, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()
