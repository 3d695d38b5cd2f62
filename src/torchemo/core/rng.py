"""Counter-based randomness: the only source of it in torchemo.

Every random draw is a pure function of a seed and a path of names and numbers, so there is no random
state to save, and nothing depends on batch size, worker or resume point.
"""

import hashlib
from operator import index
from typing import SupportsIndex

import torch


def seed_for(seed: SupportsIndex, *path: SupportsIndex | str) -> int:
    """Derive a 63-bit seed from ``seed`` and ``path``.

    Example:
        >>> seed_for(0, "episode", 3) == seed_for(0, "episode", 3)
        True
        >>> seed_for(0, "episode", 3) == seed_for(0, "episode", 4)
        False
    """
    # repr keeps 1 and "1" apart, and the tuple keeps ("a", "b") and ("ab",) apart. Integers of other
    # libraries print differently from version to version, so they become plain ones first.
    parts = tuple(part if isinstance(part, str) else index(part) for part in (seed, *path))
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(seed: SupportsIndex, *path: SupportsIndex | str) -> torch.Generator:
    """Return a fresh CPU generator that depends on ``seed`` and ``path`` alone.

    Torch seeds it with the low 32 bits, so among n paths about n^2 / 2^33 pairs share their draws.

    Example:
        >>> import torch
        >>> draw = lambda: torch.rand(2, generator=generator_for(7, "init"))
        >>> bool((draw() == draw()).all())
        True
    """
    return torch.Generator().manual_seed(seed_for(seed, *path))
