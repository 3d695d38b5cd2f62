"""Meta-Dataset-BTAF and Art-Multi: birds, textures, aircraft, fungi."""

from pathlib import Path

from torchemo.data.formats.folder import list_folder
from torchemo.data.listing import Listing, arrange

BTAF = ("CUB_Bird", "DTD_Texture", "FGVC_Aircraft", "FGVCx_Fungi")
"""The four domains of Meta-Dataset-BTAF, in the order of its tables."""


def btaf(root: Path, domain: str) -> Listing | None:
    """Read ``<domain>/<split>/<class>/*.jpg`` of Plain-Multi and Art-Multi (84 pixels)."""
    if not all((root / name).is_dir() for name in BTAF):
        return None
    pictures, empty = list_folder(root)
    classes = arrange(pictures, empty=empty, domain=domain, where=str(root))
    art = any(c.domain not in BTAF for c in classes)
    return Listing(classes, "Art-Multi" if art else "Meta-Dataset-BTAF", image_size=84)
