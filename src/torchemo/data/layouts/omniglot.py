"""Omniglot as its author publishes it."""

from collections import defaultdict
from pathlib import Path

from torchemo.core.errors import DataError
from torchemo.data.formats.folder import list_folder
from torchemo.data.listing import ListedClass, Listing, Picture


def omniglot(root: Path, domain: str) -> Listing | None:
    """Read ``images_background|images_evaluation/<alphabet>/<character>/*.png``.

    Published protocol: 28 pixels, grey, inverted (ink = 255). Without other splits the background set
    is for training and the evaluation set for testing.
    """
    classes: list[ListedClass] = []
    for folder, split in (("images_background", "train"), ("images_evaluation", "test")):
        if not (root / folder).is_dir():
            continue
        held: dict[str, list[Picture]] = defaultdict(list)
        for parts, picture in list_folder(root / folder)[0]:
            if len(parts) < 2:
                raise DataError(f"{picture.name}: lies outside any folder of a character.")
            held["/".join(parts[-2:])].append(picture)
        classes += (ListedClass(name, held[name], split, domain) for name in sorted(held))
    if not classes:
        return None
    return Listing(tuple(classes), "Omniglot", image_size=28, channels=1, invert=True)
