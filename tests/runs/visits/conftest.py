"""Tiny runs that never met data, and images of their own to visit."""

from dataclasses import replace

import pytest
import torch

from tests.runs.test_adapt import BLUE, CONFIG, GREEN, RED, noise, save, trained
from torchemo.core.rng import generator_for
from torchemo.data.formats.images import PictureForm
from torchemo.runs.adapt import form_of
from torchemo.runs.visits.returning import Returned, fit_again, fresh_index
from torchemo.runs.visits.store import Store, writing

COLOURS = {"red": RED, "blue": BLUE, "green": GREEN}


@pytest.fixture(scope="session")
def run():
    return trained(CONFIG)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def images(seed, *names, shots=1):
    """Return what a learner sees of new images of classes."""
    g = generator_for(seed, "images")
    colours = {n: torch.tensor(COLOURS.get(n, (9, 99, 200))) / 255 for n in names}
    return {
        n: (c.view(1, 3, 1, 1) + 0.1 * torch.randn(shots, 3, 16, 16, generator=g)).clamp(0, 1)
        for n, c in colours.items()
    }


def visit(run, path, seed, *names, settings=None, when=None, shots=1, recogniser=None) -> Returned:
    """Visit classes with new images, and keep the visit."""
    index = fresh_index(run, path)
    with writing(path, otherwise=replace(index, settings=settings or index.settings)) as store:
        shown = images(seed, *names, shots=shots)
        found = fit_again(run, shown, form(run), store, recogniser=recogniser)
        found.keep(store, when=when or f"2026-11-{seed + 1:02d}T10:00:00+0000")
        return found


def form(run) -> PictureForm:
    return form_of(run)


def answers(run, store: Store, seed, *names):
    """Answer fixed queries after another visit, which is not kept."""
    found = fit_again(run, images(seed, *names), form(run), store)
    query = torch.cat(list(images(900, *names, shots=3).values()))
    return found.adapted.probabilities(query)


def write_images(folder, seed, *names, shots=1):
    """Write images of classes as a support folder."""
    for name in names:
        for shot in range(shots):
            save(noise(COLOURS[name], 1000 * seed + shot), folder / name / f"{seed}-{shot}.png")
    return folder


def everything(path):
    """Return the bytes of every file of a store."""
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
