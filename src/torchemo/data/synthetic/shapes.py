"""Soft shapes on batches of small colour images, drawn from formulas.

A field is a number per image and pixel, ``[n, size, size]``; coordinates run from -1 to 1, x to the right
and y downwards. Shapes are signed distances (negative inside) and edges are one pixel soft.
"""

from dataclasses import dataclass
from math import pi
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor


@final
class Dials:
    """Unit random numbers ``[n, dials]``, read one column after the other."""

    def __init__(self, units: Float[Tensor, "n dials"]) -> None:
        self._columns = iter(units.unbind(1))

    def between(self, low: float, high: float) -> Float[Tensor, "n 1 1"]:
        """Read the next dial, scaled to ``low .. high``."""
        return (low + (high - low) * next(self._columns))[:, None, None]

    def chance(self, share: float) -> Float[Tensor, "n 1 1"]:
        """Read the next dial as 1 in this share of the cases, else 0."""
        return (self.between(0.0, 1.0) < share).float()


@final
@dataclass(frozen=True)
class Plane:
    """Coordinates in which a thing is drawn, and the width of a pixel in them."""

    x: Float[Tensor, "#n h w"]
    y: Float[Tensor, "#n h w"]
    pixel: float

    @staticmethod
    def of(size: int) -> "Plane":
        """Return the coordinates of a whole image."""
        steps = (torch.arange(size) + 0.5) * (2 / size) - 1
        return Plane(steps.expand(1, size, size), steps[:, None].expand(1, size, size), 2 / size)

    def moved(
        self, x: Tensor, y: Tensor, *, angle: Tensor, scale: Tensor, mirror: Tensor
    ) -> "Plane":
        """Return coordinates with their origin at (x, y), turned, scaled and mirrored (0 or 1)."""
        u, v = self.x - x, self.y - y
        cos, sin = angle.cos() / scale, angle.sin() / scale
        return Plane((cos * u + sin * v) * (1 - 2 * mirror), cos * v - sin * u, self.pixel)

    def ellipse(self, x: Tensor, y: Tensor, width: Tensor, height: Tensor) -> Tensor:
        """Return the distance to an ellipse with these half axes (exact for a circle)."""
        radius = ((self.x - x) / width).square() + ((self.y - y) / height).square()
        return (radius.sqrt() - 1) * torch.minimum(width, height)

    def box(self, x: Tensor, y: Tensor, width: Tensor, height: Tensor) -> Tensor:
        """Return the distance to a rectangle with these half sides."""
        return torch.maximum((self.x - x).abs() - width, (self.y - y).abs() - height)

    def wedge(self, x: Tensor, y: Tensor, length: Tensor, width: Tensor) -> Tensor:
        """Return the distance to a triangle with its base at (x, y) and its tip ``length`` to the right.

        A negative length points to the left; ``width`` is half the base.
        """
        along = (self.x - x) / length
        sides = (self.y - y).abs() - width * (1 - along)
        return torch.maximum(sides, -along * length.abs())

    def waves(self, dials: Dials, *, frequency: float) -> Tensor:
        """Return smooth clutter in -1 .. 1: four waves of random direction and phase."""
        total = torch.zeros(())
        for octave in range(4):
            angle, phase = dials.between(0.0, 2 * pi), dials.between(0.0, 2 * pi)
            rate = frequency * 1.7**octave
            across = self.x * (rate * angle.cos()) + self.y * (rate * angle.sin())
            total = total + (across + phase + 2 * total).sin() * 0.5 ** (octave + 1)
        return total


def cover(distance: Tensor, pixel: float) -> Tensor:
    """Turn a signed distance into how much of each pixel is covered, 0 .. 1."""
    return (0.5 - distance / pixel).clamp(0, 1)


def colour(hue: Tensor, saturation: Tensor, value: Tensor) -> Float[Tensor, "n 3 1 1"]:
    """Return red, green and blue of a hue (turns), saturation and value."""
    turns = hue[:, None] + torch.tensor([0.0, 2 / 3, 1 / 3])[:, None, None]
    ramps = ((turns % 1) * 6 - 3).abs().sub(1).clamp(0, 1)
    return value[:, None] * (1 - saturation[:, None] * (1 - ramps))


def paint(picture: Tensor, covered: Tensor, ink: Tensor) -> Tensor:
    """Lay ink ``[n, 3, 1, 1]`` over an image ``[n, 3, h, w]`` where it is covered ``[n, h, w]``."""
    return torch.lerp(picture, ink, covered[:, None])
