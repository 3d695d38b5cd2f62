"""From an image file to pixels: every image is treated as if it came from an unknown source."""

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from torchemo.core.errors import ConfigError, DataError

Resample: TypeAlias = Literal["lanczos", "box"]
Box: TypeAlias = tuple[int, int, int, int]
"""Left, upper, right, lower: the part of the image to keep, in pixels."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats that Pillow reads by itself; HEIC comes with the extra ``heif``."""
MAX_PIXELS = 150_000_000
LARGE = 50_000_000
"""Images with more pixels are decoded one at a time, small where their format can (JPEG)."""
MIN_SIDE = 4
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

_FILTERS = {"lanczos": Image.Resampling.LANCZOS, "box": Image.Resampling.BOX}


class PictureKind(NamedTuple):
    """What an image is before it is brought into form."""

    height: int
    width: int
    channels: int


@final
@dataclass(frozen=True)
class PictureForm:
    """The form every image of a set is brought into.

    Choice: the whole image is resized, without crop, so that its sides may change their ratio; that
    is how the published few-shot sets were made. Transparent parts are shown on white.
    """

    height: int
    width: int
    channels: int = 3
    """1 (grey) or 3 (red, green, blue)."""
    resample: Resample = "lanczos"
    """``lanczos`` as in the published sets, ``box`` for the mean over an area."""
    resize: bool = True
    """False refuses images of another size instead of resizing them."""
    invert: bool = False
    """Swap dark and light (Omniglot: ink becomes 255)."""
    max_pixels: int = MAX_PIXELS
    """Images that declare more pixels are refused before they are decoded."""

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1:
            raise ConfigError(f"an image needs at least one pixel, got {self.height}x{self.width}.")
        if self.channels not in (1, 3):
            raise ConfigError(f"an image has 1 or 3 channels, got {self.channels}.")
        if self.resample not in _FILTERS:
            raise ConfigError(f"resample is one of {', '.join(_FILTERS)}, got {self.resample!r}.")


def decode(
    source: bytes | NDArray[Any], form: PictureForm, *, name: str, box: Box | None = None
) -> UInt8[np.ndarray, "c h w"]:
    """Decode one image and bring it into form; of an animated one or one of several pages, the first.

    Returns:
        Pixels uint8 ``[channels, height, width]``.
    """
    if isinstance(source, np.ndarray) and box is None and _in_form(source, form):
        pixels = source
    else:
        # A box counts pixels of the full image, and so does a refusal of another size.
        small = max(form.height, form.width) if form.resize and box is None else None
        image = _load(source, form.max_pixels, name=name, small=small)
        image = image if box is None else image.crop(_inside(box, image.size, name=name))
        image = _on_white(_resized(image, form, name=name))
        mode = "L" if form.channels == 1 else "RGB"
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    pixels = 255 - pixels if form.invert else pixels
    return np.ascontiguousarray(pixels.reshape(form.height, form.width, -1).transpose(2, 0, 1))


def inspect(
    source: bytes | NDArray[Any], *, name: str, max_pixels: int = MAX_PIXELS
) -> PictureKind:
    """Return the size and the number of channels (1 or 3) of an image as it is."""
    image = _load(source, max_pixels, name=name)
    return PictureKind(image.height, image.width, 1 if image.mode == "L" else 3)


def _load(
    source: bytes | NDArray[Any], max_pixels: int, *, name: str, small: int | None = None
) -> Image.Image:
    """Return an image the right way up, in mode L, RGB or RGBA.

    Args:
        source: An encoded image, or pixels.
        max_pixels: What an image may declare at most.
        name: How to name it in an error.
        small: Side to which it will be resized: a large JPEG is then decoded at a fraction of its size.
    """
    if isinstance(source, np.ndarray):
        return _from_pixels(source, name=name)
    formats = _formats_for(source, name=name)
    # Size is judged below, by our own cap; damaged metadata beside good pixels is no reason to stop.
    with _quiet():
        try:
            with Image.open(io.BytesIO(source), formats=formats) as image:
                _check_header(image, max_pixels, name=name)
                if image.width * image.height > LARGE:
                    return _large(image, small, name=name)
                image.load()
                return _plain(_upright(image), name=name)
        except DataError:
            raise
        except Image.DecompressionBombError as error:
            raise _too_large(name, max_pixels) from error
        except UnidentifiedImageError as error:
            found = "is empty" if not source else f"is no readable {'/'.join(FORMATS)} image"
            raise DataError(f"{name}: {found}.", hint="Replace or remove the file.") from error
        except Exception as error:
            # A decoder fed with hostile bytes may raise anything; whatever it is, this file caused it.
            raise DataError(
                f"{name}: cannot be decoded ({error or type(error).__name__}).",
                hint="Replace or remove the file.",
            ) from error


_one_large = threading.Lock()
"""Held while a large image is decoded: images are decoded in threads, and each takes 4 bytes per pixel."""


def _large(image: Image.Image, small: int | None, *, name: str) -> Image.Image:
    """Decode a large image, at a fraction of its size if it will be small."""
    if small is not None:
        image.draft(image.mode, (2 * small, 2 * small))
    with _one_large:
        image.load()
        if small is None:
            return _plain(_upright(image), name=name)
        # Conversions and filters need several times the memory of the pixels they are given.
        return _shrunk(_plain(_shrunk(_upright(image), small), name=name), small)


def _formats_for(source: bytes, *, name: str) -> tuple[str, ...]:
    """Return the formats to try; HEIC, if it is one, once its reader is there."""
    if source[4:8] != b"ftyp" or source[8:12] not in HEIF_BRANDS:
        return FORMATS
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        raise DataError(
            f"{name}: is a HEIC image, and the package that reads these is not installed.",
            hint="pip install 'torchemo[heif]', or save the image as JPEG.",
        ) from error
    register_heif_opener(thumbnails=False)
    return ("HEIF",)


class _Quiet:
    """Warnings are a setting of the process, and images are decoded in threads: count who needs silence."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.filters = warnings.catch_warnings()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if self.inside == 0:
                self.filters = warnings.catch_warnings()
                self.filters.__enter__()
                warnings.simplefilter("ignore")
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if self.inside == 0:
                    self.filters.__exit__(None, None, None)


_quiet = _Quiet()


def _check_header(image: Image.Image, max_pixels: int, *, name: str) -> None:
    if image.width * image.height > max_pixels:
        raise _too_large(name, max_pixels)
    if min(image.size) < MIN_SIDE:
        raise DataError(
            f"{name}: is {image.height}x{image.width} pixels, too small to show anything;"
            f" both sides need {MIN_SIDE} or more."
        )


def _too_large(name: str, max_pixels: int) -> DataError:
    return DataError(
        f"{name}: declares more than {max_pixels} pixels.",
        hint="Scale the image down before using it.",
    )


def _upright(image: Image.Image) -> Image.Image:
    try:
        if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
            return image  # not even copied, as most images are so
        return ImageOps.exif_transpose(image)
    except Exception:
        # Orientation is a note beside the pixels: an unreadable note means the image as it lies.
        return image


def _shrunk(image: Image.Image, small: int) -> Image.Image:
    """Average blocks of pixels so that both sides stay well above the side they will be resized to."""
    factors = max(1, image.width // (4 * small)), max(1, image.height // (4 * small))
    if image.mode not in ("L", "LA", "RGB", "RGBA", "CMYK") or factors == (1, 1):
        return image
    return image.reduce(factors)


def _plain(image: Image.Image, *, name: str) -> Image.Image:
    if image.mode.startswith("I"):
        # Sixteen bits per pixel; Pillow would clip at 255 instead of scaling.
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        return image.convert("RGBA")
    if image.mode in ("L", "RGB"):
        return image
    if image.mode == "1":
        return image.convert("L")
    if image.mode in ("P", "CMYK", "YCbCr"):
        return image.convert("RGB")
    raise DataError(f"{name}: has the unknown colour mode {image.mode}.")


def _from_pixels(pixels: NDArray[Any], *, name: str) -> Image.Image:
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or pixels.shape[2:] == (3,)):
        raise DataError(
            f"{name}: pixels should be uint8 of shape [h, w], [h, w, 1] or [h, w, 3],"
            f" got {pixels.dtype} of shape {list(pixels.shape)}."
        )
    return Image.fromarray(np.ascontiguousarray(pixels))


def _in_form(pixels: NDArray[Any], form: PictureForm) -> bool:
    planes = () if form.channels == 1 and pixels.ndim == 2 else (form.channels,)
    return pixels.dtype == np.uint8 and pixels.shape == (form.height, form.width, *planes)


def _resized(image: Image.Image, form: PictureForm, *, name: str) -> Image.Image:
    if image.size == (form.width, form.height):
        return image
    if not form.resize:
        raise DataError(
            f"{name}: is {image.height}x{image.width} pixels,"
            f" the images before it are {form.height}x{form.width}.",
            hint="Choose --image-size to bring all images to one size.",
        )
    return image.resize((form.width, form.height), _FILTERS[form.resample])


def _inside(box: Box, size: tuple[int, int], *, name: str) -> Box:
    left, upper, right, lower = box
    inner = (max(0, left), max(0, upper), min(size[0], right), min(size[1], lower))
    if inner[0] >= inner[2] or inner[1] >= inner[3]:
        raise DataError(f"{name}: the box {box} lies outside the image of {size[0]}x{size[1]}.")
    return inner


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode != "RGBA":
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
