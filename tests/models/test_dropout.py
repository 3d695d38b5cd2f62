import pytest
import torch

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.models.dropout import DropConfig, drop_block, dropblock_gamma, dropout, keep_rate


@pytest.mark.parametrize(
    ("batch", "expected"), [(0, 1.0), (10_000, 0.975), (40_000, 0.9), (400_000, 0.9)]
)
def test_keep_rate_falls_linearly_and_stays(batch, expected):
    assert keep_rate(batch) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("block", "side", "expected"),
    [
        (5, 5, 0.1),  # 0.1 / 25 * 25 / 1
        (5, 10, 0.1 / 25 * 100 / 36),
        (2, 4, 0.1 / 4 * 16 / 9),
        (1, 7, 0.1),
    ],
)
def test_gamma_is_the_published_formula(block, side, expected):
    assert dropblock_gamma(0.9, block_size=block, side=side) == pytest.approx(expected)


def test_dropout_zeroes_the_given_share_and_keeps_the_mean():
    x = torch.ones(100, 100)
    out = dropout(x, 0.1, generator=generator_for(0))
    assert (out == 0).float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert out.max().item() == pytest.approx(1 / 0.9)
    assert out.mean().item() == pytest.approx(1.0, abs=0.01)
    assert dropout(x, 0.0, generator=generator_for(0)) is x


@pytest.mark.parametrize(("block", "side"), [(2, 5), (3, 7), (5, 5), (9, 4)])
def test_dropped_positions_form_whole_squares(block, side):
    config = DropConfig(keep=0.7, block_size=block)
    out = drop_block(
        torch.ones(4, 6, side, side), config, tasks=2, generator=generator_for(block, side)
    )
    b = min(block, side)
    zero = (out == 0).flatten(0, 1).tolist()
    assert any(value for m in zero for row in m for value in row)
    assert not all(value for m in zero for row in m for value in row)
    for m in zero:
        covered = [[False] * side for _ in range(side)]
        for i in range(side - b + 1):
            for j in range(side - b + 1):
                square = [(i + down, j + right) for down in range(b) for right in range(b)]
                if all(m[r][c] for r, c in square):
                    for r, c in square:
                        covered[r][c] = True
        assert covered == m


def test_dropblock_keeps_nearly_its_keep_rate_of_a_large_map():
    config = DropConfig(keep=0.9, block_size=3)
    out = drop_block(torch.ones(40, 20, 15, 15), config, tasks=1, generator=generator_for(0))
    # Squares overlap, so a little less than one tenth is dropped.
    assert 0.9 < (out != 0).float().mean().item() < 0.92


def test_dropblock_restores_the_mean_of_each_task_by_itself():
    config = DropConfig(keep=0.6, block_size=2)
    out = drop_block(torch.ones(2, 6, 4, 4), config, tasks=3, generator=generator_for(1))
    per_task = out.reshape(2, 3, 2, 4, 4).transpose(0, 1).flatten(1)
    torch.testing.assert_close(per_task.mean(1), torch.ones(3))
    assert per_task.max(1).values.unique().numel() > 1


def test_a_task_with_nothing_left_gives_zeros_and_not_infinities():
    config = DropConfig(keep=1e-9, block_size=5)
    out = drop_block(torch.ones(1, 1, 5, 5), config, tasks=1, generator=generator_for(0))
    assert torch.equal(out, torch.zeros_like(out))


def test_masks_are_a_function_of_the_generator():
    x = torch.ones(2, 3, 6, 6)
    draws = [
        drop_block(x, DropConfig(keep=0.5), tasks=1, generator=generator_for(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout": 1.0}, "'dropout'"),
        ({"dropout": -0.1}, "'dropout'"),
        ({"keep": 0.0}, "'keep'"),
        ({"keep": 1.1}, "'keep'"),
        ({"block_size": 0}, "'block_size'"),
    ],
)
def test_rates_outside_their_interval_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        DropConfig(**options)
