"""Counter-based randomness: the only source of it in torchemo.

Every random draw is a pure function of a seed and a path of names and numbers, so there is no random
state to save, and nothing depends on batch size, worker or resume point.
"""

import hashlib

import torch


def seed_for(seed: int, *path: int | str) -> int:
    """Derive a 63-bit seed from ``seed`` and ``path``.

    Example:
        >>> seed_for(0, "episode", 3) == seed_for(0, "episode", 3)
        True
        >>> seed_for(0, "episode", 3) == seed_for(0, "episode", 4)
        False
    """
    # repr keeps 1 and "1" apart, and the tuple keeps ("a", "b") and ("ab",) apart.
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(seed: int, *path: int | str) -> torch.Generator:
    """Return a fresh CPU generator that depends on ``seed`` and ``path`` alone.

    Example:
        >>> import torch
        >>> draw = lambda: torch.rand(2, generator=generator_for(7, "init"))
        >>> bool((draw() == draw()).all())
        True
    """
    return torch.Generator().manual_seed(seed_for(seed, *path))
