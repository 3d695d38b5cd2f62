"""The index of a store: its settings, its visits and what their files must be, in one sealed text."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

import torch

from torchemo.config.registry import Part
from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.memory.controllers import CONTROLLERS, Controller, build_controller
from torchemo.memory.interface import check_choice
from torchemo.memory.ledger import Ledger
from torchemo.runs.environment import versions
from torchemo.runs.storage.seal import seal, unseal

INDEX = "store.json"
FORMAT = "torchemo visits"
FORMAT_VERSION = 2
"""Version of the layout that is written here. Every version up to it can be read."""
MAX_INDEX = 1 << 26
"""Bytes of the largest index that is read."""
_MOST = 1 << 62
LONGEST_NAME = 255
"""Characters of a class name."""

Recognise: TypeAlias = Literal["names", "images"]
Kind: TypeAlias = Literal["gradients", "means"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[0-9a-f]{16}")


class Bytes(NamedTuple):
    """What a file must be."""

    size: int
    sha256: str


@final
@dataclass(frozen=True)
class Settings:
    """How a store works; fixed when it is made.

    Attributes:
        recognise: Known classes are recognised by their ``names``, or by their ``images``.
        capacity: Most visits to keep; None keeps all.
        controller: Which visit a full store forgets: ``fifo``, ``lru`` or ``clock``.
        clip: Largest norm of the gradient of a step, and 1 for class means; None keeps them as they are.
        noise: Standard deviation of the noise on every number, as a share of ``clip``.
    """

    recognise: Recognise = "names"
    capacity: int | None = None
    controller: str = "lru"
    clip: float | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_choice("recognise", self.recognise, get_args(Recognise))
        if self.capacity is not None and self.capacity < 1:
            raise ConfigError(f"capacity should be 1 or more, got {self.capacity}.")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigError(f"clip should be above 0, got {self.clip}.")
        if not 0 <= self.noise < float("inf"):
            raise ConfigError(f"noise should be 0 or more, got {self.noise}.")
        if self.noise and self.clip is None:
            raise ConfigError(
                "noise needs clip: it is measured in shares of the largest norm.",
                hint="Give both, such as --clip 1 --noise 0.01.",
            )
        CONTROLLERS.resolve(Part(self.controller))

    def build_controller(self) -> Controller:
        """Make the controller."""
        return build_controller(Part(self.controller))


class Visit(NamedTuple):
    """One visit in the index; its tensors are in files of their own.

    Attributes:
        id: Begins the SHA-256 of its gradients: the same images give the same visit.
        when: Date and time.
        classes: Names of the classes in label order.
        shots: Support images of each class.
        gradients: Its file of gradients.
        means: Its file of class means.
        written: Stamp of its writing, for the controller, as the next three.
        accessed: Stamp of the last time it was recalled or written.
        referenced: Reference bit of CLOCK.
        recalls: How often it was recalled.
    """

    id: str
    when: str
    classes: tuple[str, ...]
    shots: tuple[int, ...]
    gradients: Bytes
    means: Bytes
    written: int = 0
    accessed: int = 0
    referenced: bool = False
    recalls: int = 0

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return self.gradients.size + self.means.size

    def file(self, kind: Kind) -> Bytes:
        """Return what one of its files must be."""
        return self.gradients if kind == "gradients" else self.means


@final
@dataclass(frozen=True)
class Index:
    """All that a store says about itself.

    Attributes:
        weights: Digest of the weights that its gradients belong to.
        made_with: The run they were made with, for people.
        settings: How the store works.
        visits: Its visits in the order of slots.
        now: Event counter of the controller.
        hand: Hand of CLOCK.
    """

    weights: str
    made_with: str
    settings: Settings
    visits: tuple[Visit, ...] = ()
    now: int = 0
    hand: int = 0

    @property
    def by_age(self) -> tuple[Visit, ...]:
        """The visits, oldest first."""
        return tuple(sorted(self.visits, key=lambda visit: (visit.when, visit.written)))

    def ledger(self) -> Ledger:
        """Return the book-keeping of the slots, for a controller."""
        most = self.settings.capacity or len(self.visits) + 1
        ledger = Ledger.empty(min(most, len(self.visits) + 1))  # no larger than what is there
        ledger.now.fill_(self.now)
        ledger.hand.fill_(self.hand)
        ledger.filled.fill_(len(self.visits))
        for name in ("written", "accessed", "referenced", "recalls"):
            values = torch.tensor([getattr(visit, name) for visit in self.visits])
            getattr(ledger, name)[: len(self.visits)] = values
        return ledger

    def booked(self, ledger: Ledger) -> "Index":
        """Return the index with the book-keeping of a controller."""
        visits = tuple(
            visit._replace(
                written=int(ledger.written[slot]),
                accessed=int(ledger.accessed[slot]),
                referenced=bool(ledger.referenced[slot]),
                recalls=int(ledger.recalls[slot]),
            )
            for slot, visit in enumerate(self.visits)
        )
        return replace(self, visits=visits, now=int(ledger.now), hand=int(ledger.hand))

    def without(self, ids: set[str]) -> "Index":
        """Return the index without some visits."""
        kept = tuple(visit for visit in self.visits if visit.id not in ids)
        before = sum(visit.id in ids for visit in self.visits[: self.hand])
        hand = self.hand - before
        return replace(self, visits=kept, hand=hand if hand < len(kept) else 0)

    def to_bytes(self) -> bytes:
        """Write the sealed text."""
        return seal(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "versions": versions(),
                "weights": self.weights,
                "made_with": self.made_with,
                "settings": asdict(self.settings),
                "now": self.now,
                "hand": self.hand,
                "visits": [
                    {
                        **visit._asdict(),
                        "gradients": visit.gradients._asdict(),
                        "means": visit.means._asdict(),
                    }
                    for visit in self.visits
                ],
            }
        )


def parse(raw: bytes, *, what: str) -> Index:
    """Read an index with distrust; ``what`` names it in the error."""
    body = unseal(raw, what=what)
    try:
        version = _natural(body["format_version"])
        if body["format"] != FORMAT or version == 0:
            raise ValueError(f"format {body['format']!r} {version}")
        if version <= FORMAT_VERSION:
            return _index(body)
        writer = str(body["versions"].get("torchemo", "?"))
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{what} is not the index of a store ({error!r:.200}).") from error
    raise CheckpointError(
        f"{what} has format {version}, written by torchemo {writer!r:.40}; this torchemo reads formats"
        f" up to {FORMAT_VERSION}.",
        hint="Upgrade torchemo to open it.",
    )


def _index(body: Mapping[str, Any]) -> Index:
    visits = tuple(_visit(one) for one in body["visits"])
    if len({visit.id for visit in visits}) < len(visits):
        raise ValueError("a visit is there twice")
    # Format 1 had a threshold of cosine, by which nothing is recognised any more.
    given = {
        n: v for n, v in body["settings"].items() if (n, body["format_version"]) != ("threshold", 1)
    }
    settings = Settings(**given)
    if settings.capacity is not None and len(visits) > settings.capacity:
        raise ValueError("there are more visits than the store may keep")
    now, hand = _natural(body["now"]), _natural(body["hand"])
    stamps = [stamp for v in visits for stamp in (v.written, v.accessed, v.recalls)]
    if hand >= max(1, len(visits)) or now >= _MOST or max(stamps, default=0) > now:
        raise ValueError(f"no controller leaves hand {hand} and event {now} behind")
    return Index(
        _matching(_SHA256, body["weights"]),
        _text(body["made_with"]),
        settings,
        visits,
        now,
        hand,
    )


def _visit(body: Mapping[str, Any]) -> Visit:
    classes = tuple(_text(name) for name in body["classes"])
    shots = tuple(_natural(n) for n in body["shots"])
    if len(shots) != len(classes) or 0 in shots or len(set(classes)) < len(classes):
        raise ValueError(f"classes {classes!r:.100} with {shots!r:.100} images")
    files = {
        kind: Bytes(_natural(body[kind]["size"]), _matching(_SHA256, body[kind]["sha256"]))
        for kind in KINDS
    }
    return Visit(
        _matching(_ID, body["id"]),
        _text(body["when"]),
        classes,
        shots,
        files["gradients"],
        files["means"],
        _natural(body["written"]),
        _natural(body["accessed"]),
        bool(body["referenced"]),
        _natural(body["recalls"]),
    )


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} should be a whole number, 0 or more")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} should be text")
    return value


def _matching(pattern: re.Pattern[str], value: object) -> str:
    if not pattern.fullmatch(_text(value)):
        raise ValueError(f"{value!r:.80} should match {pattern.pattern}")
    return _text(value)
