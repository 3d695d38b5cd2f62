"""CIFAR-FS as class folders with lists of classes."""

from pathlib import Path

from torchemo.data.formats.folder import list_folder
from torchemo.data.layouts.lists import lines
from torchemo.data.listing import Listing, arrange


def cifar_fs_folders(root: Path, domain: str) -> Listing | None:
    """Read ``data/<class>/*.png`` with lists of classes in ``splits/<scheme>/{train,val,test}.txt``."""
    schemes = sorted(path.parent for path in root.glob("splits/*/train.txt"))
    if not schemes or not (root / "data").is_dir():
        return None
    chosen = next((s for s in schemes if s.name == "bertinetto"), schemes[0])
    split_of = {
        name: split
        for split in ("train", "val", "test")
        for name in lines(chosen / f"{split}.txt", missing_ok=True)
    }
    pictures, empty = list_folder(root / "data")
    classes = arrange(pictures, empty=empty, domain=domain, where=str(root / "data"))
    found = tuple(c._replace(split=split_of[c.name]) for c in classes if c.name in split_of)
    return Listing(found, f"CIFAR-FS folders ({chosen.name})")
