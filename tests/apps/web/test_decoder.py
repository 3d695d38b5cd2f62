"""The decoding process: bounded in time, replaced when it dies."""

import numpy as np
import pytest

from tests.apps.web.conftest import image
from torchemo.apps.web.decoder import Decoder
from torchemo.core.errors import DataError
from torchemo.data.formats.images import PictureForm, decode

FORM = PictureForm(16, 16)


def test_pixels_are_those_of_adapt_and_a_dead_process_is_replaced():
    decoder = Decoder(FORM)
    try:
        source = image("red")
        found = decoder.decode(source, name="a.png")
        assert np.array_equal(found.pixels, decode(source, FORM, name="a.png"))
        decoder._process.kill()
        with pytest.raises(DataError, match=r"a\.png: cannot be decoded within"):
            decoder.decode(source, name="a.png")
        assert decoder.decode(source, name="a.png").pixels.shape == (3, 16, 16)
    finally:
        decoder.close()


def test_an_image_that_takes_too_long_is_refused():
    decoder = Decoder(FORM, seconds=0)  # no answer is there by then
    try:
        with pytest.raises(DataError, match="within 0 seconds"):
            decoder.decode(image("red"), name="a.png")
    finally:
        decoder.close()
