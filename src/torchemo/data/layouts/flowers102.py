"""Flowers-102 with its MATLAB file of labels."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from torchemo.core.errors import DataError
from torchemo.data.formats.folder import list_folder
from torchemo.data.formats.matlab import read_numbers
from torchemo.data.formats.npz import MAX_CLASSES
from torchemo.data.layouts.lists import classes_of
from torchemo.data.listing import Listing, Picture


def flowers(root: Path, domain: str) -> Listing | None:
    """Read Flowers-102: ``jpg/image_*.jpg`` with the class of each in ``imagelabels.mat``."""
    labels = root / "imagelabels.mat"
    if not labels.is_file() or not (root / "jpg").is_dir():
        return None
    stored = read_numbers(labels, "labels")
    if not ((stored >= 0) & (stored < MAX_CLASSES) & (stored == np.floor(stored))).all():
        raise DataError(
            f"{labels}: its labels should be whole numbers from 0 to {MAX_CLASSES - 1}."
        )
    numbers = [int(number) for number in stored]
    pictures = [picture for parts, picture in list_folder(root / "jpg")[0] if not parts]
    if len(pictures) != len(numbers):
        raise DataError(f"{labels}: has {len(numbers)} labels for {len(pictures)} images in jpg.")
    held: dict[str, list[Picture]] = defaultdict(list)
    for number, picture in zip(numbers, pictures, strict=True):
        held[f"{number:03d}"].append(picture)
    return Listing(classes_of(held, domain), "Flowers-102")
