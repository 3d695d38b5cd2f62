"""miniImageNet as CSV lists beside a folder of images."""

from collections import defaultdict
from pathlib import Path

from torchemo.data.formats.folder import picture_file
from torchemo.data.layouts.lists import below, csv_rows
from torchemo.data.listing import ListedClass, Listing, Picture


def mini_imagenet_csv(root: Path, domain: str) -> Listing | None:
    """Read ``{train,val,test}.csv`` (filename, label) beside ``images/``."""
    if not (root / "images").is_dir() or not (root / "train.csv").is_file():
        return None
    classes: list[ListedClass] = []
    for split in ("train", "val", "test"):
        path = root / f"{split}.csv"
        if not path.is_file():
            continue
        held: dict[str, list[Picture]] = defaultdict(list)
        for row in csv_rows(path):
            held[row["label"]].append(picture_file(below(root / "images", row["filename"], path)))
        classes += (ListedClass(name, held[name], split, domain) for name in sorted(held))
    return Listing(tuple(classes), "miniImageNet CSV")
