"""Randomness by name: the same path gives the same draw, whatever else happens."""

import numpy as np
import pytest
import torch

from torchemo.core.rng import generator_for, seed_for


def draw(*path):
    return torch.rand(4, generator=generator_for(*path))


def test_a_draw_depends_on_seed_and_path_alone():
    first = draw(0, "episode", 3)
    torch.rand(100)
    draw(0, "episode", 4)
    assert torch.equal(draw(0, "episode", 3), first)


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    draw(0, "init")
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_stay_the_same_for_ever():
    # Saved runs are resumed by drawing again, so these numbers are part of the format. They are what
    # `b2sum -l 64` makes of "(0,)" and of the second path, as a little-endian number, halved.
    assert seed_for(0) == 2631537505891389924
    assert seed_for(7, "episode", "train", 12) == 453638621013786882


def test_paths_that_differ_anywhere_give_different_seeds():
    paths = [
        (0,),
        (1,),
        (-1,),
        (0, 1),
        (0, "1"),
        (0, "a", "b"),
        (0, "ab"),
        (0, "a b"),
        (0, "a', 'b"),
        (0, "b", "a"),
        (0, 1, 2),
        (0, 12),
        (0, ""),
    ]
    assert len({seed_for(*path) for path in paths}) == len(paths)


def test_neighbouring_episodes_do_not_share_a_stream():
    # Torch keeps the low 32 bits: 10 000 paths have 0.01 pairs in common on average.
    low = {seed_for(0, "episode", i) % 2**32 for i in range(10_000)}
    assert len(low) == 10_000


def test_seeds_fit_what_generators_take():
    seeds = [seed_for(0, i) for i in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    # 63 bits, each of them set in about half of the seeds: five standard deviations.
    for bit in range(63):
        assert abs(sum(seed >> bit & 1 for seed in seeds) - 500) < 80


def test_integers_of_other_libraries_are_the_same_numbers():
    expected = seed_for(3, "episode", 7)
    assert seed_for(np.int64(3), "episode", np.uint8(7)) == expected
    assert seed_for(3, "episode", torch.tensor(7)) == expected


def test_numbers_that_are_not_whole_are_no_part_of_a_path():
    with pytest.raises(TypeError):
        seed_for(0, 0.5)
