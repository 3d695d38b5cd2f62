"""A data layout of another distribution: ``index.txt`` with a class and a file in every line."""

from collections import defaultdict

from torchemo.data.formats.folder import picture_file
from torchemo.data.layouts.lists import classes_of, lines
from torchemo.data.listing import Listing


def listed(root, domain):
    """Read a folder with an ``index.txt``; None for any other."""
    if not (root / "index.txt").is_file():
        return None
    held = defaultdict(list)
    for line in lines(root / "index.txt"):
        name, file = line.split()
        held[name].append(picture_file(root / file))
    return Listing(classes_of(held, domain), "listed by index.txt")
