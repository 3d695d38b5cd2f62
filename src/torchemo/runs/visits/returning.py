"""Adapt a run to classes that may have come before: recognise, recall, answer with and without, keep."""

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.config.toml import to_dict
from torchemo.core.errors import ConfigError
from torchemo.core.types import Params
from torchemo.data.formats.images import PictureForm
from torchemo.memory.lifelong.memory import Recognised
from torchemo.memory.lifelong.recognise import Recogniser
from torchemo.memory.values import pick
from torchemo.runs.adapt import (
    Adapted,
    decoded_classes,
    fit,
    form_of,
    support_batch,
    support_classes,
    system_for,
)
from torchemo.runs.load import Trained
from torchemo.runs.score import memory_digest
from torchemo.runs.visits import recognition
from torchemo.runs.visits.index import Index, Settings, Visit
from torchemo.runs.visits.seen import Seen, SeenClass
from torchemo.runs.visits.store import New, Store, checked_names, refuse_other_weights, writing
from torchemo.training.device import home
from torchemo.training.lifelong import Revisit, revisit, takes_visits
from torchemo.training.predict import Classifier


@final
@dataclass(frozen=True)
class Returned:
    """A run adapted with the help of past visits, and the visit that may be kept.

    Attributes:
        adapted: What answers; ``adapted.seen`` says what came back, ``adapted.without`` answers without.
        new: This visit.
        repeated: The visit of the same images, if the store has it.
    """

    adapted: Adapted
    new: New
    repeated: Visit | None

    def keep(
        self, store: Store, *, when: str | None = None, instead_of: Collection[str] = ()
    ) -> tuple[Visit, ...]:
        """Keep the visit unless the store has it; return what a full store forgets for it."""
        if self.repeated is not None:
            return ()
        return store.keep(self.new, when=when or now(), instead_of=instead_of)


def now() -> str:
    """Return date and time here."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def fresh_index(trained: Trained, run: Path, settings: Settings | None = None) -> Index:
    """Return the index of a new store for a run.

    Raises:
        ConfigError: Past visits cannot join the run's learner.
    """
    check_learner(trained)
    system, settings = trained.system, settings or Settings()
    recogniser_of(trained, run, settings)
    made_with = f"{system.title} at step {system.iteration} of {run.resolve().name}"
    return Index(weights_digest(trained), made_with, settings)


def recogniser_of(trained: Trained, run: Path, settings: Settings) -> Recogniser | None:
    """Return what recognises classes by their images in a store; None where names do.

    Raises:
        ConfigError: The run was not calibrated for it, or cannot tell classes apart.
    """
    if settings.recognise == "names":
        return None
    found = recognition.load(run, weights=weights_digest(trained))
    if found is None:
        raise ConfigError(
            f"{run} has not learned to recognise classes by their images, or for other weights.",
            hint=f"Let it learn from its own data: torchemo memory calibrate {run}",
        )
    return found.recogniser()


def check_store(trained: Trained, store: Store) -> None:
    """Refuse a store whose gradients belong to other weights than those of the run."""
    check_learner(trained)
    system = trained.system
    what = f"this is {system.title} at step {system.iteration}"
    weights = weights_digest(trained)
    refuse_other_weights(store, weights, what=f"{what} (weights {weights[:8]})")


def check_learner(trained: Trained) -> None:
    """Refuse a run whose inner steps past visits cannot join."""
    system = trained.system
    if home(system.params).type != "cpu":
        raise ConfigError(
            "past visits are joined on the CPU alone.", hint="Leave --device out, or --remember."
        )
    if system.memory is not None and not system.memory.offsets_start:
        raise ConfigError(
            f"{system.title} joins gradients of its own memory to inner steps, and so do past visits.",
            hint="Use a run without such a memory: --preset anil or maml, alone or with -offsets.",
        )
    if not takes_visits(system.learner, system.params):
        raise ConfigError(
            f"{system.title} has no inner steps on a shared network that past visits could join.",
            hint="Train with a preset such as maml, anil or meta-sgd to use --remember.",
        )


def weights_digest(trained: Trained) -> str:
    """Return the SHA-256 of all that decides a gradient: weights, memory, learner and networks."""
    network = trained.network
    config = to_dict(trained.config)
    about = {
        "learner": config["learner"],
        "model": config["model"],
        "pretrained": None if network is None else network.described(),
        "memory": memory_digest(trained.system.memory),
        "shape": list(trained.shape.x),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for name, tensor in sorted(trained.system.params.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def fit_again(
    trained: Trained,
    classes: Mapping[str, Float[Tensor, "n ..."]],
    form: PictureForm,
    store: Store,
    *,
    recogniser: Recogniser | None = None,
    besides: Collection[str] = (),
) -> Returned:
    """Fit a run to classes and to their past visits in a store, but ``besides``; nothing is changed.

    ``classes`` is what the learner sees of the images of each class, ``form`` their size and channels,
    ``recogniser`` that of `recogniser_of`.
    """
    check_store(trained, store)
    names = checked_names(classes)
    without = fit(trained, classes, form)
    learner, own = without.classifier.learner, _own_gradients(without.classifier)
    repeated = store.find(own)
    left_out = {*besides, *([] if repeated is None else [repeated.id])}
    system = system_for(trained, len(names))
    found = revisit(
        learner,
        system.params,
        support_batch(classes),
        store.memory(learner.model.head, recogniser=recogniser, besides=left_out),
        names=[names] if store.settings.recognise == "names" else None,
        own_memory=system.memory,
    )
    asked = [visit.id for visit in store.index.by_age if visit.id not in left_out]
    by_images = store.settings.recognise == "images"
    taken = {line.name for line in store.classes} if by_images else set()
    return Returned(
        _adapted(without, found, repeated), _new(found, own, names, asked, taken), repeated
    )


def _adapted(without: Adapted, found: Revisit, repeated: Visit | None) -> Adapted:
    return replace(
        without,
        classifier=replace(without.classifier, fitted=found.fitted),
        seen=_seen(without.classes, found.recognised[0], repeated),
        without=without,
    )


def _new(
    found: Revisit, own: Params, names: tuple[str, ...], asked: Sequence[str], taken: set[str]
) -> New:
    known = found.recognised[0]
    recalled = tuple(asked[slot] for slot in known.slots)
    return New(found.sights[0], own, _kept_names(names, known, taken), recalled)


def _own_gradients(classifier: Classifier) -> Params:
    """Return the gradients of the base learner's inner steps, ``{name: [step, *shape]}``."""
    fitted = classifier.fitted
    values = pick("per_step", fitted.gradients, fitted.path, fitted.extra_values or {})
    return {name: value[0].clone() for name, value in values.items()}


def _seen(names: tuple[str, ...], recognised: Recognised, repeated: Visit | None) -> Seen:
    shares = [_share(recognised, c) for c in range(len(names))]
    classes = zip(names, recognised.names, recognised.visits, shares, strict=True)
    return Seen(
        tuple(SeenClass(*one) for one in classes),
        len(recognised.slots),
        recognised.last,
        "" if repeated is None else repeated.when,
    )


def _share(recognised: Recognised, label: int) -> float | None:
    """Return how probable it is that a class is the one it is named after, or else any known one."""
    if recognised.shares is None:
        return None
    shares = {name: float(share[label]) for name, share in recognised.shares.items()}
    named = recognised.names[label]
    return sum(shares.values()) if named is None else shares[named]


def _kept_names(names: tuple[str, ...], recognised: Recognised, known: set[str]) -> tuple[str, ...]:
    """Return the names under which classes are kept: known ones, or new ones that are free."""
    kept = [name for name in recognised.names if name is not None]
    found = []
    for name, old in zip(names, recognised.names, strict=True):
        # Images may say that a class is new although its name is taken.
        free = old or _free(name, {*known, *kept})
        found.append(free)
        kept.append(free)
    return tuple(found)


def _free(name: str, taken: set[str]) -> str:
    numbered = (name if i == 1 else f"{name} ({i})" for i in range(1, len(taken) + 2))
    return next(one for one in numbered if one not in taken)


def adapt_again(
    trained: Trained,
    support: Path,
    remember: Path,
    *,
    run: Path,
    invert: bool = False,
    strict: bool = False,
    settings: Settings | None = None,
) -> tuple[Adapted, tuple[Visit, ...]]:
    """Fit a run to a support folder with the help of a store, and keep the visit in it.

    Args:
        trained: The run.
        support: Folder of class folders.
        remember: Folder of the store; it is made if there is none.
        run: Folder of the run.
        invert: Swap dark and light in all images.
        strict: Refuse images that cannot be read, instead of leaving them out.
        settings: How a new store works.

    Returns:
        What answers, and the visits that a full store forgot.
    """
    otherwise = fresh_index(trained, run, settings)
    with writing(remember, otherwise=otherwise) as store:
        check_store(trained, store)  # before any image is read
        recogniser = recogniser_of(trained, run, store.settings)
        form = form_of(trained, invert=invert)
        images, bad = decoded_classes(trained, support_classes(support), form, strict=strict)
        returned = fit_again(trained, images, form, store, recogniser=recogniser)
        return replace(returned.adapted, left_out=bad), returned.keep(store)


def check_steps(steps: int | None) -> None:
    """Refuse a number of inner steps beside a store, whose gradients belong to the steps of training."""
    if steps is not None:
        raise ConfigError(
            "past visits are kept for the inner steps of training.",
            hint="Leave --steps out, or --remember.",
        )
