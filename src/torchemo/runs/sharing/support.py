"""A run fitted to a support folder, with the images that it was fitted to."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from torchemo.data.formats.images import decode
from torchemo.runs.adapt import Adapted, adapt_to, form_of, support_classes
from torchemo.runs.load import load_trained

FEW = 32
"""Images of a support folder that a file is checked on."""


def adapted_with_images(
    run: Path,
    support: Path,
    *,
    step: int | None = None,
    steps: int | None = None,
    invert: bool = False,
    strict: bool = False,
) -> tuple[Adapted, np.ndarray]:
    """Fit a run to a support folder; also return some of its images as a file for others sees them."""
    trained = load_trained(run, step=step)
    classes = support_classes(support)
    adapted = adapt_to(trained, classes, steps=steps, invert=invert, strict=strict)
    # A file swaps dark and light itself.
    form = replace(form_of(trained), invert=False)
    bad = {one.name for one in adapted.left_out}
    few = [p for c in classes for p in c.pictures if p.name not in bad][:FEW]
    return adapted, np.stack([decode(p.read(), form, name=p.name) for p in few])
