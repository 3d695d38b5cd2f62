"""decode: what a good image becomes, and how a bad one is refused."""

import io
import struct
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from torchemo.core.errors import ConfigError, DataError
from torchemo.data.formats import images
from torchemo.data.formats.images import PictureForm, decode, inspect

FORM = PictureForm(16, 16)
GREY = PictureForm(16, 16, channels=1)


def photo(height=16, width=16, seed=0):
    """A smooth colour image, so that lossy formats stay close."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    phase = np.random.default_rng(seed).uniform(0, 3, (3, 1, 1))
    waves = 128 + 100 * np.sin(x / width * 2 + y / height * 3 + phase)
    return np.moveaxis(waves, 0, -1).astype(np.uint8)


def encode(pixels, format="PNG", **options):
    stream = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(stream, format, **options)
    return stream.getvalue()


def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width, height):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = png_chunk(b"IDAT", zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + body


@pytest.mark.parametrize("format", ["PNG", "BMP"])
def test_a_lossless_picture_of_the_right_size_keeps_every_pixel(format):
    pixels = photo()
    assert np.array_equal(decode(encode(pixels, format), FORM, name="a"), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_a_lossy_picture_comes_close(format):
    pixels = photo()
    got = decode(encode(pixels, format, quality=95), FORM, name="a").transpose(1, 2, 0)
    assert np.abs(got.astype(int) - pixels).mean() < 4


def test_pixels_go_the_same_way_as_a_file():
    pixels, form = photo(40, 30), PictureForm(16, 12)
    assert np.array_equal(decode(pixels, form, name="a"), decode(encode(pixels), form, name="a"))
    grey = pixels[:, :, :1]
    assert np.array_equal(decode(grey, GREY, name="a"), decode(grey[:, :, 0], GREY, name="a"))


@pytest.mark.parametrize("form", [FORM, GREY])
@pytest.mark.parametrize("planes", [slice(0, 3), slice(0, 1), 0])
def test_pixels_of_the_right_size_get_the_channels_asked_for(form, planes):
    pixels = photo()[:, :, planes]
    got = decode(pixels, form, name="a")
    assert got.shape == (form.channels, 16, 16)
    assert np.array_equal(got, decode(encode(pixels.squeeze()), form, name="a"))


def test_box_resampling_takes_the_mean_over_areas():
    pixels = photo(32, 48)
    got = decode(pixels, PictureForm(8, 12, resample="box"), name="a")
    means = pixels.reshape(8, 4, 12, 4, 3).mean((1, 3)).transpose(2, 0, 1)
    assert np.abs(got - means).max() <= 1


def test_lanczos_and_box_differ_and_lanczos_is_the_default():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    form = PictureForm(16, 16)
    assert form.resample == "lanczos"
    oracle = Image.fromarray(pixels).resize((16, 16), Image.Resampling.LANCZOS)
    assert np.array_equal(decode(pixels, form, name="a").transpose(1, 2, 0), np.asarray(oracle))
    box = PictureForm(16, 16, resample="box")
    assert not np.array_equal(decode(pixels, box, name="a"), decode(pixels, form, name="a"))


@pytest.mark.parametrize(("orientation", "turns"), [(3, 2), (6, 3), (8, 1)])
def test_a_photograph_is_turned_the_way_its_camera_was_held(orientation, turns):
    pixels = photo(16, 24)
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = np.rot90(pixels, turns)
    form = PictureForm(*upright.shape[:2])
    got = decode(encode(pixels, exif=exif.tobytes()), form, name="a")
    assert np.array_equal(got.transpose(1, 2, 0), upright)


def test_damaged_metadata_does_not_cost_a_good_picture():
    data = encode(photo(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff garbage")
    assert decode(data, FORM, name="a").shape == (3, 16, 16)


def test_a_part_of_a_picture_is_cut_out_and_clipped_to_its_borders():
    pixels = photo(20, 30)
    got = decode(pixels, PictureForm(6, 10), name="a", box=(20, 14, 99, 99))
    assert np.array_equal(got.transpose(1, 2, 0), pixels[14:, 20:])
    with pytest.raises(DataError, match=r"a\.png: the box .* lies outside"):
        decode(pixels, FORM, name="a.png", box=(30, 0, 40, 20))


def test_sixteen_bits_are_scaled_and_not_clipped():
    deep = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    got = decode(encode(Image.fromarray(deep)), GREY, name="a")
    assert np.array_equal(got[0], np.arange(256).reshape(16, 16))


def test_transparent_parts_are_shown_on_white():
    pixels = np.dstack([photo(), np.full((16, 16), 255, np.uint8)])
    pixels[:8, :, 3] = 0
    got = decode(encode(pixels), FORM, name="a").transpose(1, 2, 0)
    assert (got[:8] == 255).all()
    assert np.array_equal(got[8:], pixels[8:, :, :3])


def test_a_palette_with_a_transparent_colour_is_shown_on_white():
    image = Image.fromarray(photo()).quantize(8)
    index, colours = np.asarray(image), np.asarray(image.convert("RGB"))
    image.info["transparency"] = bytes([0, 128] + [255] * 6)
    got = decode(encode(image), FORM, name="a").transpose(1, 2, 0)
    assert (got[index == 0] == 255).all()
    assert np.array_equal(got[index > 1], colours[index > 1])


def test_cmyk_becomes_red_green_and_blue():
    ink = np.zeros((16, 16, 4), np.uint8)
    ink[..., 0] = 255
    got = decode(encode(Image.fromarray(ink, "CMYK"), "JPEG", quality=95), FORM, name="a")
    assert got[0].max() < 30
    assert got[1:].min() > 225


def test_black_and_white_and_grey_pictures_fill_one_or_three_channels():
    bits = (photo()[:, :, 0] > 128).astype(np.uint8) * 255
    data = encode(Image.fromarray(bits).convert("1"))
    assert np.array_equal(decode(data, GREY, name="a")[0], bits)
    assert np.array_equal(decode(data, FORM, name="a"), np.stack([bits] * 3))
    assert inspect(data, name="a") == (16, 16, 1)
    assert inspect(encode(photo(16, 20)), name="a") == (16, 20, 3)


def test_inverting_swaps_dark_and_light():
    pixels = photo()
    form = PictureForm(16, 16, invert=True)
    assert np.array_equal(decode(pixels, form, name="a"), 255 - pixels.transpose(2, 0, 1))


def test_a_wrong_name_does_not_matter_because_the_content_decides():
    assert decode(encode(photo(), "JPEG"), FORM, name="picture.png").shape == (3, 16, 16)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "TIFF"])
def test_of_several_frames_or_pages_the_first_counts(format):
    frames = [Image.fromarray(photo(seed=seed)) for seed in range(3)]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
    got = decode(data, FORM, name="a").transpose(1, 2, 0).astype(int)
    off = [np.abs(got - photo(seed=seed)).mean() for seed in range(3)]
    assert off[0] < 4 < min(off[1:])  # a GIF has 256 colours


def test_a_photograph_of_a_telephone_is_read(monkeypatch):
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    pixels = photo(64, 48)
    data = encode(pixels, "HEIF", quality=95)
    form = PictureForm(64, 48)
    got = decode(data, form, name="a").transpose(1, 2, 0)
    assert np.abs(got.astype(int) - pixels).mean() < 4
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(DataError, match="a: is a HEIC image") as refused:
        decode(data, form, name="a")
    assert "torchemo[heif]" in refused.value.hint


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(monkeypatch):
    pixels = np.full((6300, 10000, 3), 128, np.uint8)
    pixels[..., 0] = np.arange(10000) * 255 // 9999
    pixels[..., 1] = (np.arange(6300) * 255 // 6299)[:, None]
    data, form = encode(pixels, "JPEG", quality=90), PictureForm(24, 32)
    allocated = []
    load = Image.Image.load

    def watched(image):
        allocated.append(image.size)
        return load(image)

    monkeypatch.setattr(Image.Image, "load", watched)
    got = decode(data, form, name="a").astype(int)
    assert max(w * h for w, h in allocated) < 1_000_000
    rows, columns = (np.arange(24) + 0.5) / 24 * 255, (np.arange(32) + 0.5) / 32 * 255
    assert np.abs(got[0] - columns).max() < 6
    assert np.abs(got[1] - rows[:, None]).max() < 6


@pytest.mark.parametrize("mode", ["LA", "RGBA", "RGB", "P"])
def test_a_large_image_is_shrunk_before_it_is_converted_and_looks_the_same(monkeypatch, mode):
    image = Image.fromarray(photo(300, 700)).convert(mode)
    data, form = encode(image, "TIFF"), PictureForm(12, 16)
    plainly = decode(data, form, name="a").astype(int)
    monkeypatch.setattr(images, "LARGE", 1000)
    resized = []
    resize = Image.Image.resize

    def watched(image, size, *rest, **options):
        resized.append(image.size)
        return resize(image, size, *rest, **options)

    monkeypatch.setattr(Image.Image, "resize", watched)
    got = decode(data, form, name="a").astype(int)
    assert 0 < max(w * h for w, h in resized) < 700 * 300 / 8
    assert np.abs(got - plainly).max() <= 3


def test_small_images_are_enlarged():
    assert decode(encode(photo(4, 5)), FORM, name="a").shape == (3, 16, 16)


BAD = {
    "empty": (b"", "is empty"),
    "text": (b"not an image at all", "is no readable PNG/JPEG/WEBP/BMP/GIF/TIFF image"),
    "icon": (encode(photo(), "ICO"), "is no readable PNG/JPEG/WEBP/BMP/GIF/TIFF image"),
    "torn jpeg": (encode(photo(64, 64), "JPEG")[:-200], "cannot be decoded"),
    "torn png": (encode(photo(64, 64))[:200], "cannot be decoded"),
    "torn webp": (encode(photo(64, 64), "WEBP")[:60], "cannot be decoded"),
    "flipped png": (encode(photo()).replace(b"IDAT", b"IDAU"), "is no readable"),
    "one pixel": (encode(photo(1, 1)), "is 1x1 pixels, too small"),
    "900 Mpx": (png_header(30000, 30000), "more than 150000000 pixels"),
    "160 Mpx": (png_header(16000, 10000), "more than 150000000 pixels"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_picture_is_refused_with_its_name_and_the_reason(bad):
    data, reason = BAD[bad]
    with pytest.raises(DataError, match=f"^birds/wren.png: .*{reason}"):
        decode(data, FORM, name="birds/wren.png")


@given(
    cut=st.integers(0, 2000),
    flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 255)), max_size=5),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_damaged_bytes_give_a_picture_or_a_named_error_and_nothing_else(format, cut, flips):
    data = bytearray(encode(photo(24, 24), format))
    for place, change in flips:
        data[place % len(data)] ^= change
    try:
        got = decode(bytes(data[: max(1, len(data) - cut)]), FORM, name="wren")
    except DataError as error:
        got = error.message
    assert got.startswith("wren: ") if isinstance(got, str) else got.shape == (3, 16, 16)


def test_pictures_of_another_size_are_refused_where_resizing_was_not_asked_for():
    form = PictureForm(16, 16, resize=False)
    with pytest.raises(DataError, match=r"b\.png: is 20x16 pixels, the images before it are 16x16"):
        decode(encode(photo(20, 16)), form, name="b.png")
    assert decode(encode(photo()), form, name="a").shape == (3, 16, 16)


@pytest.mark.parametrize(
    "pixels", [np.zeros((16, 16, 2), np.uint8), np.zeros((16, 16, 3)), np.zeros(16, np.uint8)]
)
def test_pixels_of_another_kind_are_refused(pixels):
    with pytest.raises(DataError, match="a: pixels should be uint8"):
        decode(pixels, FORM, name="a")


@pytest.mark.parametrize("changes", [{"height": 0}, {"channels": 2}])
def test_an_impossible_form_is_refused(changes):
    with pytest.raises(ConfigError):
        PictureForm(**({"height": 8, "width": 8} | changes))
