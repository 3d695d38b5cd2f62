"""Digests of named tensors: equal ones have equal bits."""

import hashlib

import torch

from torchemo.core.types import Params


def digest_of(tensors: Params) -> str:
    """Return the SHA-256 of named tensors, names included.

    Example:
        >>> digest_of({"w": torch.zeros(2)}) == digest_of({"w": torch.zeros(2)})
        True
        >>> digest_of({"w": torch.zeros(2)}) == digest_of({"w": -torch.zeros(2)})
        False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
