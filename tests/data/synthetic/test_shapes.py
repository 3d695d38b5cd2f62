"""Canvas: areas, colours and coordinates against closed forms."""

import colorsys
import math

import pytest
import torch

from torchemo.data.synthetic.shapes import Dials, Plane, colour, cover, paint


def number(value):
    return torch.tensor(float(value)).view(1, 1, 1)


def area(plane, distance):
    return float(cover(distance, plane.pixel).sum()) * plane.pixel**2


def test_soft_shapes_have_the_area_of_the_shapes():
    plane = Plane.of(256)
    circle = plane.ellipse(number(0.1), number(-0.2), number(0.5), number(0.5))
    assert area(plane, circle) == pytest.approx(math.pi * 0.25, rel=0.01)
    box = plane.box(number(0.2), number(0), number(0.3), number(0.4))
    assert area(plane, box) == pytest.approx(4 * 0.3 * 0.4, rel=0.02)
    for length in (0.6, -0.6):
        wedge = plane.wedge(number(0), number(0.1), number(length), number(0.3))
        assert area(plane, wedge) == pytest.approx(0.6 * 0.3, rel=0.03)
        inside = cover(wedge, plane.pixel)[0]
        assert float((inside * plane.x[0]).sum()) * length > 0


def test_pixels_lie_at_the_centres_of_their_squares():
    plane = Plane.of(4)
    assert plane.x[0, 0].tolist() == [-0.75, -0.25, 0.25, 0.75]
    assert plane.y[0, :, 0].tolist() == [-0.75, -0.25, 0.25, 0.75]


def test_the_distance_to_a_circle_is_exact():
    plane = Plane.of(16)
    got = plane.ellipse(number(0.1), number(-0.2), number(0.4), number(0.4))
    expected = torch.hypot(plane.x - 0.1, plane.y + 0.2) - 0.4
    assert torch.allclose(got, expected, atol=1e-6)


def test_an_edge_is_one_pixel_soft():
    assert cover(torch.tensor([-0.1, -0.05, 0.0, 0.05, 0.1]), 0.1).tolist() == pytest.approx(
        [1, 1, 0.5, 0, 0]
    )


def test_moved_coordinates_follow_the_thing_that_moved():
    plane = Plane.of(64)
    x, y, angle, scale = 0.3, -0.2, 0.7, 1.4
    for mirror in (0, 1):
        at = plane.moved(
            number(x), number(y), angle=number(angle), scale=number(scale), mirror=number(mirror)
        )
        for u, v in ((0.0, 0.0), (0.2, 0.1)):
            w = -u if mirror else u
            px = x + scale * (math.cos(angle) * w - math.sin(angle) * v)
            py = y + scale * (math.sin(angle) * w + math.cos(angle) * v)
            near = ((plane.x - px).square() + (plane.y - py).square()).flatten().argmin()
            assert abs(float(at.x.flatten()[near]) - u) < plane.pixel
            assert abs(float(at.y.flatten()[near]) - v) < plane.pixel


def test_colours_agree_with_the_standard_library():
    units = torch.rand(50, 3, generator=torch.Generator().manual_seed(0))
    hue, saturation, value = (units[:, i, None, None] for i in range(3))
    got = colour(hue - 1, saturation, value).view(50, 3)
    expected = [colorsys.hsv_to_rgb(*row) for row in units.tolist()]
    assert torch.allclose(got, torch.tensor(expected), atol=1e-5)


def test_paint_covers_as_much_as_it_says():
    picture = torch.full((2, 3, 1, 3), 0.2)
    covered = torch.tensor([[[0.0, 0.5, 1.0]], [[1.0, 0.0, 0.0]]])
    ink = torch.tensor([1.0, 0.6, 0.0]).view(1, 3, 1, 1)
    got = paint(picture, covered, ink)
    assert got[0, :, 0].tolist() == [
        pytest.approx([0.2, 0.6, 1.0]),
        pytest.approx([0.2, 0.4, 0.6]),
        pytest.approx([0.2, 0.1, 0.0]),
    ]
    assert got[1, 0, 0].tolist() == pytest.approx([1.0, 0.2, 0.2])


def test_dials_are_read_one_after_the_other():
    dials = Dials(torch.tensor([[0.0, 0.5, 0.2], [1.0, 0.5, 0.8]]))
    assert dials.between(2.0, 4.0).flatten().tolist() == [2, 4]
    assert dials.between(-1.0, 1.0).flatten().tolist() == [0, 0]
    assert dials.chance(0.5).flatten().tolist() == [1, 0]
    with pytest.raises(StopIteration):
        dials.chance(0.5)


def test_clutter_stays_between_minus_one_and_one_and_differs_between_pictures():
    units = torch.rand(20, 8, generator=torch.Generator().manual_seed(0))
    waves = Plane.of(32).waves(Dials(units), frequency=4.0)
    assert waves.shape == (20, 32, 32)
    assert waves.abs().max() <= 1
    assert waves.std((1, 2)).min() > 0.05
    assert (waves[0] - waves[1]).abs().mean() > 0.1
