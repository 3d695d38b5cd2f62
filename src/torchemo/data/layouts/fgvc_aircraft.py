"""FGVC-Aircraft by variant, cut to its bounding boxes."""

from collections import defaultdict
from pathlib import Path

from torchemo.data.formats.folder import picture_file
from torchemo.data.formats.images import Box
from torchemo.data.layouts.lists import below, classes_of, lines, numbers_in, pairs
from torchemo.data.listing import Listing, Picture


def fgvc_aircraft(root: Path, domain: str) -> Listing | None:
    """Read FGVC-Aircraft: ``images/*.jpg`` by variant, cut to ``images_box.txt`` where it is there.

    The boxes also leave out the line of text at the bottom of every image.
    """
    lists = sorted(root.glob("images_variant_*.txt"))
    if not lists or not (root / "images").is_dir():
        return None
    variant_of = {number: variant for path in lists for number, variant in pairs(path).items()}
    box_of: dict[str, Box] = {}
    for line in lines(root / "images_box.txt", missing_ok=True):
        number, *sides = line.split()
        left, upper, right, lower = numbers_in(sides, 4, path=root / "images_box.txt")
        # Boxes count pixels from 1 and include their last one.
        box_of[number] = (left - 1, upper - 1, right, lower)
    held: dict[str, list[Picture]] = defaultdict(list)
    for number, variant in sorted(variant_of.items()):
        path = below(root / "images", f"{number}.jpg", root)
        held[variant].append(picture_file(path)._replace(box=box_of.get(number)))
    return Listing(classes_of(held, domain), "FGVC-Aircraft variants, cut to their boxes")
