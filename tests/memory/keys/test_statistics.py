"""Keys from plain statistics, against loops over pixels and moments in numpy."""

import math

import numpy as np
import pytest
import torch

from tests.memory.keys.cases import build, images, pairs
from torchemo.core.errors import ShapeError
from torchemo.memory.keys.statistics import StatisticsKey


def test_colour_statistics_are_channel_means_and_deviations():
    support = images(tasks=1)
    expected = [[], []]
    for channel in range(3):
        pixels = [image[channel].flatten().tolist() for image in support.x[0]]
        means = [sum(p) / len(p) for p in pixels]
        stds = [
            math.sqrt(sum((v - m) ** 2 for v in p) / len(p))
            for p, m in zip(pixels, means, strict=True)
        ]
        expected[0].append(sum(means) / len(means))
        expected[1].append(sum(stds) / len(stds))
    got = StatisticsKey(3)(support)[0]
    torch.testing.assert_close(got, torch.tensor(expected[0] + expected[1]).double())


def test_pair_statistics_are_means_deviations_and_covariances():
    support = pairs(tasks=1)
    z = torch.cat([support.x[0], support.y[0]], 1).numpy()
    c = np.cov(z.T, bias=True)
    expected = [*z.mean(0), *z.std(0), c[0, 1], c[0, 2], c[1, 2]]
    got = StatisticsKey(2, 1)(support)[0]
    torch.testing.assert_close(got, torch.tensor(expected).double())


def test_statistics_have_nothing_to_train():
    assert not list(StatisticsKey(3).parameters())


def naive_description(image):
    """The numbers of `describe_pictures`, by loops over pixels."""
    c, h, w = image.shape
    pixels = image.numpy()
    mean = [pixels[i].mean() for i in range(c)]
    parts = [(m - 0.5) / 0.2 for m in mean]
    parts += [(pixels[i].std() - 0.25) / 0.1 for i in range(c)]
    for down, right in ((0, 1), (1, 0)):
        for i in range(c):
            steps = [
                abs(pixels[i, y + down, x + right] - pixels[i, y, x])
                for y in range(h - down)
                for x in range(w - right)
            ]
            parts.append((sum(steps) / len(steps) - 0.06) / 0.04)
    for i in range(c):
        for j in range(i + 1, c):
            together = ((pixels[i] - mean[i]) * (pixels[j] - mean[j])).mean()
            parts.append(math.copysign(math.sqrt(abs(together)), together) / 0.2)
    side = h // 4
    for i in range(c):
        for y in range(4):
            for x in range(4):
                cell = pixels[i, y * side : (y + 1) * side, x * side : (x + 1) * side]
                parts.append((cell.mean() - 0.5) / 0.25)
    return parts


def through(network, statistics):
    """Two layers and a length of one, in numpy."""
    w1, b1, w2, b2 = (p.detach().numpy() for p in network.parameters())
    key = w2 @ np.maximum(w1 @ np.array(statistics) + b1, 0) + b2
    return torch.tensor(key / np.linalg.norm(key))


def test_a_network_of_image_statistics_equals_loops_over_pixels():
    support, network = images(tasks=1), build("learned-statistics", "own")
    rows = np.array([naive_description(image) for image in support.x[0]])
    expected = through(network, [*rows.mean(0), *rows.std(0)])
    torch.testing.assert_close(network(support)[0], expected)


def test_a_network_of_pair_statistics_equals_moments_in_numpy():
    support, network = pairs(tasks=1), build("learned-statistics", "pairs")
    z = torch.cat([support.x[0], support.y[0]], 1).numpy()
    c, d = np.cov(z.T, bias=True), z - z.mean(0)
    bends = [(d[:, i] ** power * d[:, 2]).mean() for power in (2, 3) for i in (0, 1)]
    moments = np.array([*z.mean(0), *z.std(0), c[0, 1], c[0, 2], c[1, 2], *bends])
    expected = through(network, np.sign(moments) * np.log1p(np.abs(moments)))
    torch.testing.assert_close(network(support)[0], expected)


def test_images_of_another_number_of_channels_are_refused():
    with pytest.raises(ShapeError, match=r"\[B, n, 1, H, W\]"):
        StatisticsKey(1)(images())
