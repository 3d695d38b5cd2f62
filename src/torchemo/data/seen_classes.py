"""Test classes that a pretrained network may have been trained on: results on them would be too good."""

import re

from torchemo.core.errors import DataError
from torchemo.data.source import PictureTasks

_SYNSET = re.compile(r"n\d{8}")
"""Names of ImageNet's classes, which miniImageNet and tieredImageNet keep."""
_NAMES = re.compile(r"(mini|tiered).?imagenet", re.IGNORECASE)


def refuse_seen_classes(
    source: object, *, network: str, trained_on: str | None, split: str
) -> None:
    """Refuse tasks of ImageNet's classes for a network that was trained on ImageNet.

    Args:
        source: The tasks; other than those of images are not looked at.
        network: Name of the network.
        trained_on: ImageNet, if the network was trained on that.
        split: Whose classes are tested on.

    Raises:
        DataError: A class of the split is one of ImageNet's; names it.
    """
    tasks = getattr(source, "source", source)  # a stream draws its tasks from another source
    if trained_on is None or not isinstance(tasks, PictureTasks):
        return
    index = tasks.index
    for kind in index.classes(split=split):
        name, domain = index.class_names[kind], index.class_domain[kind]
        if _SYNSET.fullmatch(name) or _NAMES.search(domain):
            raise DataError(
                f"{domain}: its {split} class '{name}' is one of {trained_on}, on which"
                f" {network} was trained: results would be too good.",
                hint="Test on other data, or accept it with --allow-leak (model.allow_leak=true).",
            )
