"""The images behind tasks as data URIs, also where tasks are made of features of images."""

import base64
import io
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from torchemo.config.run import DataConfig
from torchemo.core.errors import TorchemoError
from torchemo.data.episodes import to_unit
from torchemo.data.formats.images import PictureForm, decode
from torchemo.data.listing import Picture
from torchemo.data.load import find, splits_for
from torchemo.data.source import PictureTasks

SIDE = 48


class Thumbnails:
    """Images of a run's tasks by their number in the data.

    Features are computed once and hold no pixels: their images are read again from the files that the run
    was trained with, if these are still there and as many as then.
    """

    def __init__(self, source: PictureTasks, data: DataConfig) -> None:
        self.index, self.data = source.index, data

    def __call__(self, number: int) -> str:
        """Return an image as a data URI; empty if it cannot be shown."""
        if not self.index.holds_features:
            return picture_uri(to_unit(np.array(self.index.images[number])))
        kind = int(self.index.label[number])
        name = (self.index.class_domain[kind], self.index.class_names[kind])
        pictures = self._pictures.get(name, [])
        # Copies and unreadable images were left out: then places in the class do not name an image.
        if len(pictures) != self.index.counts[kind]:
            return ""
        picture = pictures[int(np.searchsorted(self.index.images_of(kind), number))]
        try:
            pixels = decode(picture.read(), PictureForm(SIDE, SIDE), name=picture.name)
        except TorchemoError:
            return ""
        return picture_uri(torch.from_numpy(pixels) / 255)

    @cached_property
    def _pictures(self) -> dict[tuple[str, str], list[Picture]]:
        file = None if self.data.splits is None else Path(self.data.splits)
        try:
            splits = splits_for(self.data.source, file=file, scheme=self.data.scheme)
            found = [
                find(path, splits=chosen)
                for path, chosen in zip(self.data.source, splits, strict=True)
            ]
        except TorchemoError:
            return {}
        return {(c.domain, c.name): list(c.pictures) for one in found for c in one.classes}


def picture_uri(picture: Float[Tensor, "c h w"]) -> str:
    """Turn an image in [0, 1] into a PNG data URI, shrunk if it is large."""
    pixels = (picture.detach().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
