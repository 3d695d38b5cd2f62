"""Four domains of synthetic images: things that look a little like birds, textures, aircraft, fungi.

Each domain is a function of two sets of unit random numbers: ``kind`` makes the class (proportions, colours,
markings) and ``shot`` makes the image (pose, light, background).
"""

from collections.abc import Callable
from math import pi
from typing import TypeAlias

import torch
from torch import Tensor

from torchemo.data.synthetic.shapes import Dials, Plane, colour, cover, paint

World: TypeAlias = Callable[[Dials, Dials, int], Tensor]
"""``(kind, shot, size) -> images [n, 3, size, size]``, roughly in 0 .. 1."""

DIALS = 32
"""How many random numbers a class has, and how many an image."""


def birds(kind: Dials, shot: Dials, size: int) -> Tensor:
    """Draw a body with head, beak, wing and tail, before foliage or sky."""
    plane = Plane.of(size)
    scene = _backdrop(plane, shot, hues=(0.2, 0.6), saturation=0.5, frequency=3.0)
    at = _pose(plane, shot, spread=0.14, tilt=0.35, scales=(1.0, 1.35))
    nil = torch.zeros(1, 1, 1)
    length, depth = kind.between(0.38, 0.62), kind.between(0.2, 0.38)
    head, reach = kind.between(0.13, 0.24), kind.between(0.08, 0.36)
    tail, fan = kind.between(0.15, 0.6), kind.between(0.05, 0.22)
    back = colour(kind.between(-0.05, 0.2), kind.between(0.1, 0.8), kind.between(0.3, 0.8))
    wing = colour(kind.between(0.0, 0.2), kind.between(0.1, 0.8), kind.between(0.15, 0.8))
    crown = colour(kind.between(-0.1, 0.3), kind.between(0.0, 0.9), kind.between(0.1, 0.9))
    bars, bar_rate = kind.chance(0.5), kind.between(14.0, 26.0)
    breast = colour(kind.between(0.0, 0.18), kind.between(0.0, 0.6), kind.between(0.6, 1.0))
    beak = colour(kind.between(0.05, 0.18), kind.between(0.3, 0.9), kind.between(0.3, 0.95))

    head_x, head_y = length * 0.85, -depth * 0.8
    scene = paint(scene, cover(at.wedge(-length * 0.6, nil, -(tail + 0.3), fan), at.pixel), wing)
    scene = paint(
        scene, cover(at.wedge(head_x + head * 0.7, head_y, reach, head * 0.5), at.pixel), beak
    )
    scene = paint(scene, cover(at.ellipse(nil, nil, length, depth), at.pixel), back)
    belly = at.ellipse(length * 0.2, depth * 0.5, length * 0.6, depth * 0.55)
    scene = paint(scene, cover(belly, at.pixel), breast)
    scene = paint(scene, cover(at.ellipse(head_x, head_y, head, head), at.pixel), crown)
    wing_shape = at.ellipse(-length * 0.2, -depth * 0.1, length * 0.55, depth * 0.5)
    scene = paint(scene, cover(wing_shape, at.pixel), wing)
    striped = bars * (0.5 + 0.5 * (at.x * bar_rate).sin()) * 0.8
    scene = paint(scene, cover(wing_shape, at.pixel) * striped, breast)
    eye = at.ellipse(head_x + head * 0.3, head_y - head * 0.2, head * 0.28, head * 0.28)
    return _lit(paint(scene, cover(eye, at.pixel), torch.zeros(1, 3, 1, 1)), shot)


def textures(kind: Dials, shot: Dials, size: int) -> Tensor:
    """Fill the image with a pattern of two crossed waves and a ripple, bent and sharpened."""
    plane = Plane.of(size)
    nil = torch.zeros(1, 1, 1)
    angle = kind.between(0.0, pi) + shot.between(-0.35, 0.35)
    at = plane.moved(
        shot.between(-1.0, 1.0),
        shot.between(-1.0, 1.0),
        angle=angle,
        scale=shot.between(0.8, 1.25),
        mirror=nil,
    )
    rate, cross_rate, ripple_rate = (kind.between(4.0, 15.0) for _ in range(3))
    bend, bend_rate = kind.between(0.0, 1.6), kind.between(1.5, 5.0)
    along = (rate * at.x + bend * (bend_rate * at.y + shot.between(0.0, 2 * pi)).sin()).sin()
    across = (cross_rate * at.y + bend * (bend_rate * at.x).sin()).sin()
    ripple = (ripple_rate * (at.x.square() + at.y.square()).sqrt()).sin()
    mix = [kind.between(0.0, 1.0) ** 2 for _ in range(4)]
    pattern = mix[0] * along + mix[1] * across + mix[2] * along * across * 2 + mix[3] * ripple
    sharp = (kind.between(1.0, 6.0) * (pattern + kind.between(-0.4, 0.4))).tanh() * 0.5 + 0.5
    hue, drift = kind.between(0.0, 1.0), shot.between(-0.3, 0.3)
    ground = colour(hue + drift, kind.between(0.1, 0.7), shot.between(0.25, 0.7))
    ink = colour(
        hue + drift + kind.between(0.0, 0.5), kind.between(0.1, 0.8), shot.between(0.5, 1.0)
    )
    return _lit(paint(ground.expand(-1, -1, size, size), sharp, ink), shot)


def aircraft(kind: Dials, shot: Dials, size: int) -> Tensor:
    """Draw a fuselage with wing, fin, engines and livery before a sky."""
    plane = Plane.of(size)
    scene = _backdrop(plane, shot, hues=(0.5, 0.72), saturation=0.45, frequency=2.0)
    at = _pose(plane, shot, spread=0.1, tilt=0.2, scales=(1.05, 1.3))
    nil = torch.zeros(1, 1, 1)
    length, girth = kind.between(0.5, 0.8), kind.between(0.08, 0.19)
    sweep, span, root = kind.between(-0.2, 0.8), kind.between(0.25, 0.6), kind.between(0.08, 0.22)
    seat = kind.between(-0.15, 0.25)
    fin, fin_width = kind.between(0.15, 0.45), kind.between(0.07, 0.16)
    hull = colour(kind.between(0.0, 1.0), kind.between(0.0, 0.2), kind.between(0.6, 1.0))
    livery = colour(kind.between(0.55, 1.05), kind.between(0.2, 0.9), kind.between(0.2, 0.8))
    metal = colour(kind.between(0.5, 0.7), kind.between(0.0, 0.2), kind.between(0.3, 0.7))
    band, stripe = kind.between(-0.6, 0.6), kind.between(0.1, 0.5)
    engines, engine = kind.between(0.51, 3.49).round(), kind.between(0.04, 0.09)

    rear = at.x + length * 0.85 - (at.y + girth).abs() * 0.6
    fin_shape = torch.maximum(rear.abs() - fin_width, (at.y + girth + fin / 2).abs() - fin / 2)
    scene = paint(scene, cover(fin_shape, at.pixel), livery)
    scene = paint(scene, cover(at.ellipse(nil, nil, length, girth), at.pixel), hull)
    stripe_shape = at.box(nil, band * girth, length, stripe * girth)
    inside = torch.maximum(stripe_shape, at.ellipse(nil, nil, length, girth))
    scene = paint(scene, cover(inside, at.pixel), livery)
    slant = at.x - seat + at.y * sweep
    narrowing = root * (1 - 0.6 * (at.y / span).clamp(0, 1))
    wing = torch.maximum(slant.abs() - narrowing, (at.y - span / 2).abs() - span / 2)
    scene = paint(scene, cover(wing, at.pixel), metal)
    for place in range(3):
        mount = span * (0.35 + 0.25 * place)
        pod = at.ellipse(seat - mount * sweep + root * 0.8, mount, engine * 1.8, engine)
        scene = paint(scene, cover(pod, at.pixel) * (engines > place).float(), livery * 0.6)
    cockpit = at.ellipse(length * 0.8, -girth * 0.25, length * 0.08, girth * 0.3)
    return _lit(paint(scene, cover(cockpit, at.pixel), torch.full((1, 3, 1, 1), 0.1)), shot)


def fungi(kind: Dials, shot: Dials, size: int) -> Tensor:
    """Draw a stem and a spotted cap on a forest floor, sometimes with a smaller neighbour."""
    plane = Plane.of(size)
    scene = _backdrop(plane, shot, hues=(0.05, 0.35), saturation=0.6, frequency=5.0, value=0.6)
    main = _pose(plane, shot, spread=0.15, tilt=0.25, scales=(0.95, 1.25))
    side = _pose(plane, shot, spread=0.7, tilt=0.5, scales=(0.35, 0.6))
    company = shot.chance(0.5)
    nil, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    width, height, cone = kind.between(0.3, 0.68), kind.between(0.15, 0.5), kind.between(0.0, 1.0)
    stem, stem_width, bulge = (
        kind.between(0.3, 0.7),
        kind.between(0.05, 0.17),
        kind.between(0.0, 1.0),
    )
    cap = colour(kind.between(-0.06, 0.16), kind.between(0.1, 1.0), kind.between(0.3, 0.95))
    flesh = colour(kind.between(0.05, 0.18), kind.between(0.0, 0.45), kind.between(0.55, 1.0))
    mark = colour(kind.between(0.0, 0.2), kind.between(0.0, 0.5), kind.between(0.1, 1.0))
    spots, rate, size_of_spots = kind.chance(0.6), kind.between(8.0, 18.0), kind.between(0.0, 0.9)
    ring, rim = kind.chance(0.5), kind.between(0.02, 0.12)

    for at, there in ((side, company), (main, one)):
        swell = stem_width * (1 + bulge * ((at.y - 0.1) / stem).clamp(0, 1))
        trunk = torch.maximum(at.x.abs() - swell, (at.y - stem / 2).abs() - stem / 2)
        scene = paint(scene, cover(trunk, at.pixel) * there, flesh)
        skirt = at.ellipse(nil, stem * 0.35, stem_width * 2.2, stem_width * 0.7)
        scene = paint(scene, cover(skirt, at.pixel) * ring * there, flesh * 0.8)
        round_cap = at.ellipse(nil, nil, width, height)
        pointed = at.x.abs() / width - (at.y + height) / height
        dome = torch.maximum(round_cap, pointed * width * cone + (cone - 1))
        shape = cover(torch.maximum(dome, at.y - rim), at.pixel) * there
        scene = paint(scene, shape, cap)
        dots = (rate * at.x).cos() * (rate * at.y + rate * at.x * 0.4).cos() - size_of_spots
        scene = paint(scene, shape * (dots * 6).clamp(0, 1) * spots, mark)
        scene = paint(scene, shape * cover(-at.y, at.pixel), flesh * 0.6)
    return _lit(scene, shot)


WORLDS: dict[str, World] = {
    "synthetic-birds": birds,
    "synthetic-textures": textures,
    "synthetic-aircraft": aircraft,
    "synthetic-fungi": fungi,
}


def _pose(
    plane: Plane, shot: Dials, *, spread: float, tilt: float, scales: tuple[float, float]
) -> Plane:
    return plane.moved(
        shot.between(-spread, spread),
        shot.between(-spread, spread),
        angle=shot.between(-tilt, tilt),
        scale=shot.between(*scales),
        mirror=shot.chance(0.5),
    )


def _backdrop(
    plane: Plane,
    shot: Dials,
    *,
    hues: tuple[float, float],
    saturation: float,
    frequency: float,
    value: float = 0.85,
) -> Tensor:
    """Fill the background: two colours of the surroundings, mixed by clutter and height."""
    clutter = plane.waves(shot, frequency=frequency)
    first, second = (
        colour(shot.between(*hues), shot.between(0.1, saturation), shot.between(0.4, 1.0) * value)
        for _ in range(2)
    )
    mix = (0.5 + 0.5 * clutter + 0.3 * plane.y).clamp(0, 1)
    return paint(first.expand(-1, -1, *mix.shape[1:]), mix, second)


def _lit(picture: Tensor, shot: Dials) -> Tensor:
    """Change the strength and tint of the light."""
    return picture * colour(shot.between(0.0, 1.0), shot.between(0.0, 0.3), shot.between(0.7, 1.1))
