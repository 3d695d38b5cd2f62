"""CUB-200-2011, cut to its bounding boxes."""

from pathlib import Path

from torchemo.data.formats.folder import list_folder
from torchemo.data.formats.images import Box
from torchemo.data.layouts.lists import lines, numbers_in, pairs
from torchemo.data.listing import Listing, arrange


def cub(root: Path, domain: str) -> Listing | None:
    """Read CUB-200-2011: ``images/<class>/*.jpg``, cut to ``bounding_boxes.txt``."""
    boxes, numbers = root / "bounding_boxes.txt", root / "images.txt"
    if not (boxes.is_file() and numbers.is_file() and (root / "images").is_dir()):
        return None
    name_of = pairs(numbers)
    box_of: dict[str, Box] = {}
    for line in lines(boxes):
        number, *sides = line.split()
        left, upper, width, height = numbers_in(sides, 4, path=boxes)
        box_of[name_of.get(number, "")] = (left, upper, left + width, upper + height)
    pictures = [
        (parts, p._replace(box=box_of.get("/".join([*parts, Path(p.name).name]))))
        for parts, p in list_folder(root / "images")[0]
    ]
    classes = arrange(pictures, domain=domain, where=str(root))
    return Listing(classes, "CUB-200-2011, cut to its boxes")
