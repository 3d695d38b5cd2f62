"""Listings: how folders are understood, and what happens to images that are not alike."""

import warnings
from functools import partial

import numpy as np
import pytest

from torchemo.core.errors import DataError
from torchemo.data import listing as listings
from torchemo.data.formats import images as decoding
from torchemo.data.formats.images import PictureForm, decode
from torchemo.data.listing import ListedClass, Listing, Picture, arrange, decode_all, form_for, join


def at(*places):
    """Images that lie at these paths."""
    return [(tuple(place.split("/")[:-1]), Picture(place, bytes)) for place in places]


def understood(*places, **options):
    classes = arrange(at(*places), domain="given", where="set", **options)
    return {(c.domain, c.split, c.name): [p.name for p in c.pictures] for c in classes}


def test_class_folders_become_classes_with_sorted_pictures():
    assert understood("wren/2.png", "jay/1.png", "wren/1.png") == {
        ("given", None, "jay"): ["jay/1.png"],
        ("given", None, "wren"): ["wren/1.png", "wren/2.png"],
    }


@pytest.mark.parametrize("middle", ["val", "valid", "validation", "Val"])
def test_split_folders_become_splits(middle):
    assert set(understood("train/wren/1.png", f"{middle}/jay/1.png", "test/tit/1.png")) == {
        ("given", "train", "wren"),
        ("given", "val", "jay"),
        ("given", "test", "tit"),
    }


def test_domain_folders_above_split_folders_become_domains():
    assert set(understood("CUB_Bird/train/wren/1.jpg", "DTD_Texture/test/banded/1.jpg")) == {
        ("CUB_Bird", "train", "wren"),
        ("DTD_Texture", "test", "banded"),
    }


@pytest.mark.parametrize("outer", ["images", "a/b", "a/b/c"])
def test_folders_that_hold_nothing_else_are_passed_through(outer):
    assert set(understood(f"{outer}/wren/1.png", f"{outer}/jay/1.png")) == {
        ("given", None, "wren"),
        ("given", None, "jay"),
    }
    deep = understood(f"{outer}/x/train/wren/1.png", f"{outer}/y/train/wren/1.png")
    assert set(deep) == {("x", "train", "wren"), ("y", "train", "wren")}


def test_a_class_may_be_called_train_when_it_is_one_of_several_vehicles():
    assert set(understood("train/1.png", "bus/1.png")) == {
        ("given", None, "train"),
        ("given", None, "bus"),
    }


def test_an_empty_folder_beside_classes_is_an_empty_class_and_any_other_is_not():
    found = understood("wren/1.png", empty=[("jay",), ("wren", "deeper")])
    assert found == {("given", None, "wren"): ["wren/1.png"], ("given", None, "jay"): []}


def test_names_written_with_and_without_combining_accents_are_the_same():
    composed, combining = "caf\u00e9", "cafe\u0301"
    found = understood(f"{composed}/1.png", f"{combining}/2.png")
    assert [key[2] for key in found] == [composed]
    assert len(found["given", None, composed]) == 2


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([], "set: there are no images in it"),
        (["1.png", "wren/1.png"], "image 1.png lies outside any class folder"),
        (["wren/1.png", "more/jay/1.png"], "different depths: wren/1.png and more/jay/1.png"),
        (["tits/blue/1.png", "crows/jay/1.png"], "cannot tell classes from other folders"),
    ],
)
def test_folders_that_could_mean_anything_are_refused(places, message):
    with pytest.raises(DataError, match=message):
        understood(*places)


def listing_of(*contents, **options):
    pictures = [Picture(f"{i}.png", lambda c=c: c) for i, c in enumerate(contents)]
    return Listing([ListedClass("wren", pictures, "train", "birds")], "test", **options)


def test_the_first_readable_picture_settles_size_and_channels(picture):
    listing = listing_of(b"bad", picture(0, size=12), picture(1, size=8))
    form = form_for(listing, image_size=None, channels=None, resample="box")
    assert form == PictureForm(12, 12, 3, "box", resize=False)
    outcomes = [outcome for _, _, outcome in decode_all(listing, form)]
    assert [type(outcome) for outcome in outcomes] == [DataError, np.ndarray, DataError]
    assert "is 8x8 pixels, the images before it are 12x12" in outcomes[2].message


def test_asking_goes_before_protocol_and_protocol_before_the_first_picture(picture):
    listing = listing_of(picture(0), image_size=28, channels=1, invert=True)
    protocol = form_for(listing, image_size=None, channels=None, resample="lanczos")
    assert protocol == PictureForm(28, 28, 1, invert=True)
    asked = form_for(listing, image_size=10, channels=3, resample="lanczos")
    assert asked == PictureForm(10, 10, 3, invert=True)
    only_size = form_for(listing_of(picture(0)), image_size=10, channels=None, resample="lanczos")
    assert only_size == PictureForm(10, 10, 3)


def test_without_any_readable_picture_the_form_cannot_be_settled():
    with pytest.raises(DataError, match=r"0\.png: is no readable"):
        form_for(listing_of(b"bad"), image_size=None, channels=None, resample="lanczos")
    with pytest.raises(DataError, match="no images"):
        form_for(listing_of(), image_size=None, channels=None, resample="lanczos")


def test_progress_is_told_after_every_picture(picture):
    told = []
    listing = listing_of(picture(0), b"bad", picture(2))
    steps = decode_all(listing, PictureForm(8, 8), progress=lambda *seen: told.append(seen))
    assert len(list(steps)) == 3
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_joining_keeps_all_classes_and_refuses_to_mix_inverted_data():
    one, two = listing_of(b""), listing_of(b"", b"")
    assert join([one, two]).total == 3
    with pytest.raises(DataError, match="inverted"):
        join([one, listing_of(invert=True)])
    with pytest.raises(DataError, match="nothing to join"):
        join([])


def test_pictures_decoded_on_many_cores_come_in_order_and_leave_warnings_as_they_were(
    picture, monkeypatch
):
    monkeypatch.setattr(listings, "usable_cores", lambda: 4)
    # Large ones take their time, so that the small ones after them are done first.
    encoded = [picture(seed, size=400 if seed % 5 == 0 else 8) for seed in range(40)]
    encoded[7] = b"no image"
    classes = [
        ListedClass(
            str(c), [Picture(f"{c}/{i}", partial(encoded.__getitem__, i)) for i in rows], None, ""
        )
        for c, rows in enumerate((range(25), range(25, 40)))
    ]
    form, seen, before = PictureForm(8, 8), [], list(warnings.filters)
    found = list(decode_all(Listing(classes, "given"), form, progress=lambda *at: seen.append(at)))
    assert [(number, p.name) for number, p, _ in found] == [
        (i // 25, f"{i // 25}/{i}") for i in range(40)
    ]
    for i, (_, _, pixels) in enumerate(found):
        if i == 7:
            assert isinstance(pixels, DataError)
        else:
            assert np.array_equal(pixels, decode(encoded[i], form, name="alone"))
    assert seen == [(i, 40) for i in range(1, 41)]
    assert warnings.filters == before
    assert decoding._quiet.inside == 0


def test_pictures_are_read_a_few_ahead_and_no_more(picture, monkeypatch):
    monkeypatch.setattr(listings, "usable_cores", lambda: 2)
    read = []

    def source(i):
        read.append(i)
        return picture(i)

    pictures = [Picture(str(i), partial(source, i)) for i in range(50)]
    listing = Listing([ListedClass("one", pictures, None, "")], "given")
    stream = decode_all(listing, PictureForm(8, 8))
    next(stream)
    assert len(read) == 2 * listings.AHEAD
    stream.close()
