"""Thumbnails of training tasks behind each slot, as notes beside a run; made only when asked for.

They are training images, which may not be the user's to give away: no export holds them.
"""

from pathlib import Path
from typing import NamedTuple, cast

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from torchemo.core.digest import digest_of
from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.core.types import Params, Recall
from torchemo.runs.load import Opened
from torchemo.runs.storage import durable, tensorfile

FILE = "thumbnails.safetensors"
_DIGEST = "digest"
SIDE = 48
"""Largest side of a thumbnail in pixels."""
PROBES = 256
"""Training tasks that are looked at; each slot shows those that recall it most."""
MAX_BYTES = 1 << 26

_SEED, _BATCH = 20261, 16


class Thumbnails(NamedTuple):
    """Images of the training tasks that recall each slot most.

    Attributes:
        step: Checkpoint they belong to.
        images: ``[slot, n, C, H, W]``; the first images of a slot are of the task that recalls it most.
        known: How many images each slot has.
    """

    step: int
    images: UInt8[Tensor, "slot n C H W"]
    known: Tensor

    def of(self, slot: int) -> UInt8[Tensor, "n C H W"]:
        """Return the images of a slot; none of a slot that no task recalled."""
        if not 0 <= slot < len(self.known):
            return self.images.new_empty(0, *self.images.shape[2:])
        return self.images[slot, : int(self.known[slot])]


def make(opened: Opened, *, per_slot: int = 4, probes: int = PROBES) -> Thumbnails:
    """Look at training tasks and take images of those that recall each slot most.

    Args:
        opened: The run, with its data.
        per_slot: Images of each slot, one for each class of a task before the next task's.
        probes: Training tasks to look at.
    """
    memory = opened.system.memory
    if memory is None:
        raise ConfigError("this run has no memory, so there are no slots to illustrate.")
    shape = opened.source.shape.x
    if opened.source.shape.kind != "classification" or len(shape) != 3:
        raise ConfigError("the tasks of this run are not made of images that could be shown.")
    weights, firsts = _look(opened, probes)
    images = torch.zeros(memory.store.capacity, per_slot, *_small(shape), dtype=torch.uint8)
    known = torch.zeros(memory.store.capacity, dtype=torch.int64)
    for slot in range(weights.shape[1]):
        order = weights[:, slot].argsort(descending=True, stable=True)
        tasks = [int(t) for t in order if weights[t, slot] > 0]
        chosen = [image for t in tasks for image in firsts[t]][:per_slot]
        known[slot] = len(chosen)
        for place, image in enumerate(chosen):
            images[slot, place] = image
    return Thumbnails(opened.system.iteration, images, known)


def _small(shape: tuple[int, ...]) -> tuple[int, int, int]:
    channels, height, width = shape
    factor = min(1.0, SIDE / max(height, width))
    return channels, max(1, round(height * factor)), max(1, round(width * factor))


def _look(opened: Opened, probes: int) -> tuple[Tensor, list[Tensor]]:
    """Return the recall weight of each task for each slot, and one small image per class of each task."""
    memory = opened.system.memory
    weights, firsts = [], []
    for start in range(0, probes, _BATCH):
        count = min(_BATCH, probes - start)
        episode = opened.source.sample("train", seed=_SEED, start=start, count=count, n_query=1)
        recall = cast(Recall, opened.system.predict(episode, steps=0, every_step=False).recall)
        filled = recall.keys.new_zeros(count, 0 if memory is None else len(memory.store))
        weights.append(filled.scatter_add(1, recall.slots, recall.weights * recall.active[:, None]))
        for x, y in zip(episode.support.x, episode.support.y, strict=True):
            first = torch.stack([x[y == c][0] for c in y.unique()])
            small = interpolate(first, _small(opened.source.shape.x)[1:], mode="area")
            firsts.append((255 * small.clamp(0, 1)).round().byte())
    return torch.cat(weights), firsts


def save(root: Path, found: Thumbnails) -> Path:
    """Write thumbnails beside a run; earlier ones are replaced."""
    tensors = {"images": found.images, "known": found.known, "step": torch.tensor(found.step)}
    durable.replace_file(root / FILE, tensorfile.encode({**tensors, _DIGEST: _digest(tensors)}))
    return root / FILE


def _digest(tensors: Params) -> Tensor:
    return torch.tensor(list(bytes.fromhex(digest_of(tensors))), dtype=torch.uint8)


def load(root: Path, *, step: int) -> Thumbnails | None:
    """Read the thumbnails of a run; None if there are none, or if they are of another checkpoint."""
    path = root / FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        tensors = tensorfile.decode(durable.read_regular(path), what=str(path))
        said = tensors.pop(_DIGEST, None)  # earlier versions wrote none
        sound = said is None or torch.equal(said, _digest(tensors))
        found = Thumbnails(int(tensors["step"]), tensors["images"], tensors["known"])
    except (OSError, CheckpointError, KeyError, ValueError, RuntimeError):
        return None  # they illustrate, and nothing depends on them
    images, known = found.images, found.known
    whole = images.dtype == torch.uint8 and images.dim() == 5 and known.dtype == torch.int64
    fits = sound and whole and known.shape == images.shape[:1]
    return found if fits and found.step == step else None
