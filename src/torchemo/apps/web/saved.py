"""A session in other forms: what the page shows, CSV, JSON, and a zip that ``adapt`` also takes."""

import csv
import io
import json
import re
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from torchemo.apps.web.board import Board
from torchemo.apps.web.decoder import Decoder
from torchemo.apps.web.session import Kept, Limits, Session, new_key
from torchemo.core.errors import DataError, ResourceError
from torchemo.data.formats.archive import Caps, list_zip

LONGEST_FILE = 80
"""Characters of a file's name that are kept."""


def state(session: Session) -> dict[str, Any]:
    """Return all the page shows."""
    with session.lock:
        board, answered, job = session.board, session.answered, session.job

        def one(key: str) -> dict[str, Any]:
            return {"key": key, "name": session.images[key].name}

        return {
            "number": session.count_shown(),
            "boxes": [
                {"key": box.key, "name": box.name, "images": [one(key) for key in box.images]}
                for box in board.boxes
            ],
            "queries": [{**one(key), "answer": answered.queries.get(key)} for key in board.queries],
            "task": answered.task or None,
            "job": None if job is None else dict(vars(job)),
            "steps_back": session.steps_back,
            "kept": session.is_kept,
        }


def as_dict(session: Session) -> dict[str, Any]:
    """Return the answers by file and class."""
    with session.lock:
        answered, board = session.answered, session.board
        names = [name for name, _ in board.support]
        predictions = []
        for key in board.queries:
            answer = answered.queries.get(key)
            if answer is not None:
                predictions.append({"file": session.images[key].name, **_named(answer, names)})
        shots = {name: len(images) for name, images in board.support}
        return {**answered.task, "classes": shots, "predictions": predictions}


def as_csv(session: Session) -> str:
    """Return the answers as a table: one line per query, one column per class."""
    found = as_dict(session)
    stream = io.StringIO(newline="")
    table = csv.writer(stream)
    classes = list(found["classes"])
    table.writerow(map(_cell, ["file", "predicted", "probability", *classes]))
    for one in found["predictions"]:
        shares = one["probabilities"]
        table.writerow([
            _cell(one["file"]), _cell(one["predicted"]), f"{one['probability']:.6f}",
            *(f"{shares[name]:.6f}" for name in classes),
        ])  # fmt: skip
    return stream.getvalue()


def packed(session: Session) -> bytes:
    """Return a zip: ``support/<class>/``, ``query/`` and ``answers.json``.

    Images have the size that the network takes, without loss, so that the answers stay the same; nothing
    else of a photograph (place, time, camera) is kept.
    """
    stream = io.BytesIO()
    with session.lock, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        folders = [(f"support/{box.name}", box.images) for box in session.board.boxes]
        for folder, keys in (*folders, ("query", session.board.queries)):
            taken: set[str] = set()
            for key in keys:
                kept = session.images[key]
                name = _free(kept.name, taken)
                archive.writestr(f"{folder}/{name}", png(kept.image.pixels))
        archive.writestr("answers.json", json.dumps(as_dict(session), indent=2))
    return stream.getvalue()


def unpacked(body: bytes, decoder: Decoder, limits: Limits) -> tuple[Board, dict[str, Kept]]:
    """Read what `packed` wrote.

    Raises:
        DataError: It is no such zip, or an image in it cannot be read.
        ResourceError: It holds more than the page takes.
    """
    board, images, boxes = Board(), dict[str, Kept](), dict[str, str]()
    most = limits.support + limits.queries
    caps = Caps(members=most + limits.classes + 1, total_bytes=2 * limits.session_bytes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "session.zip")
        path.write_bytes(body)
        for folders, picture in list_zip(path, caps=caps):
            name, key = PurePosixPath(picture.name).name, new_key()
            if folders[:1] == ("support",) and len(folders) == 2:
                if folders[1] not in boxes:
                    boxes[folders[1]] = new_key()
                    board = board.with_box(boxes[folders[1]], folders[1])
                board = board.with_image(key, box=boxes[folders[1]])
            elif folders == ("query",):
                board = board.with_image(key, box=None)
            else:
                raise DataError(
                    f"{picture.name}: a saved session has support/<class>/<image> and query/<image>."
                )
            source = picture.read()
            images[key] = Kept(name, decoder.decode(bytes(source), name=name))
    if not images:
        raise DataError("there are no images in this zip.")
    if len(board.boxes) > limits.classes:
        raise ResourceError(f"the page takes at most {limits.classes} classes.")
    return board, images


def file_name(name: str) -> str:
    """Return the name of a file as it is kept: printable, without folders, not too long."""
    plain = re.split(r"[/\\]", name)[-1].lstrip(".")
    shown = "".join(c if c.isprintable() else "_" for c in plain)
    return shown[-LONGEST_FILE:].lstrip(".") or "image"


def png(pixels: UInt8[np.ndarray, "c h w"]) -> bytes:
    """Encode pixels without loss."""
    stream = io.BytesIO()
    plane = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    Image.fromarray(np.ascontiguousarray(plane)).save(stream, "PNG")
    return stream.getvalue()


def _named(answer: dict[str, Any], names: list[str]) -> dict[str, Any]:
    shares = dict(zip(names, answer["probabilities"], strict=True))
    best = max(shares, key=shares.__getitem__)
    found = {"predicted": best, "probability": shares[best], "probabilities": shares}
    if answer["without"] is not None:
        found["without_memory"] = dict(zip(names, answer["without"], strict=True))
    return found


def _free(name: str, taken: set[str]) -> str:
    """Return a name that no other image of this folder has; images are saved as PNG."""
    stem = PurePosixPath(name).stem or "image"
    found = next(n for i in range(len(taken) + 1) if (n := _numbered(stem, i)) not in taken)
    taken.add(found)
    return found


def _numbered(stem: str, number: int) -> str:
    return f"{stem}.png" if number == 0 else f"{stem} ({number}).png"


def _cell(text: str) -> str:
    """Keep a spreadsheet from taking a name for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
