"""The work of one tab: its board, what can be taken back, its images, and its answers."""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from torchemo.apps.web.board import Board, Content
from torchemo.apps.web.decoder import Decoded
from torchemo.core.errors import ConfigError, DataError, ResourceError


@final
@dataclass(frozen=True)
class Limits:
    """What the page takes at most."""

    sessions: int = 4
    """Tabs whose work is kept; the one not used for longest gives way."""
    classes: int = 100
    support: int = 500
    """Support images of a session."""
    queries: int = 500
    """Queries of a session."""
    image_bytes: int = 1 << 26
    """Size of one image file."""
    session_bytes: int = 1 << 28
    """Size of a saved session."""
    steps_back: int = 50
    """Changes that can be taken back."""
    seconds: float = 60.0
    """Time to send one file."""


class Kept(NamedTuple):
    """An image of a session: the name of its file, and what became of it."""

    name: str
    image: Decoded


@final
@dataclass
class Job:
    """Queries that are being answered."""

    total: int
    done: int = 0
    cancelled: bool = False
    error: str | None = None
    running: bool = True


@final
@dataclass
class Answered:
    """What is known about one support set: about the task, and about each query."""

    task: dict[str, Any] = field(default_factory=dict)
    queries: dict[str, dict[str, Any]] = field(default_factory=dict)


@final
class Session:
    """The work of one tab; every method may be called from any thread.

    Args:
        limits: What it takes at most.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.used = time.monotonic()
        self.lock = threading.RLock()
        self.board = Board()
        self.images: dict[str, Kept] = {}
        self.job: Job | None = None
        # Those kept in the store, with the keys of their images.
        self.visits: dict[str, frozenset[str]] = {}
        self._past: list[Board] = []
        self._answers: OrderedDict[Content, Answered] = OrderedDict()
        self._shown = 0

    @property
    def steps_back(self) -> int:
        """How many changes can be taken back."""
        return len(self._past)

    def count_shown(self) -> int:
        """Count what is shown: replies may overtake each other, and the page keeps the latest."""
        with self.lock:
            self._shown += 1
            return self._shown

    @property
    def answered(self) -> Answered:
        """What is known about the support set on the board; it comes back when a change is taken back."""
        with self.lock:
            found = self._answers.setdefault(self.board.support, Answered())
            self._answers.move_to_end(self.board.support)
            while len(self._answers) > 8:
                self._answers.popitem(last=False)
            return found

    @property
    def same_visits(self) -> tuple[str, ...]:
        """Ids of the visits kept in this session whose images are on the board."""
        with self.lock:
            there = {image for box in self.board.boxes for image in box.images}
            return tuple(visit for visit, images in self.visits.items() if images & there)

    @property
    def is_kept(self) -> bool:
        """Whether the board is in the store as it is."""
        with self.lock:
            there = {image for _, images in self.board.support for image in images}
            return any(images == there for images in self.visits.values())

    def forget_answers(self) -> None:
        """Forget all answers: past visits that had a part in them changed."""
        with self.lock:
            self._answers.clear()

    def change(self, change: Callable[[Board], Board]) -> None:
        """Change the board; refused while queries are answered."""
        with self.lock:
            self._refuse_while_running()
            board = change(self.board)
            self._check(board)
            self._past.append(self.board)
            del self._past[: -self.limits.steps_back]
            self._put(board)

    def add_image(self, name: str, image: Decoded, *, box: str | None) -> str:
        """Put an image into a box, or among the queries, and return its key."""
        key = new_key()
        with self.lock:
            self.images[key] = Kept(name, image)
            try:
                self.change(lambda board: board.with_image(key, box=box))
            except (ConfigError, DataError, ResourceError):
                del self.images[key]
                raise
        return key

    def replace(self, board: Board, images: dict[str, Kept]) -> None:
        """Put another board in the place of this one, which can be taken back."""
        with self.lock:
            self.images |= images
            self.change(lambda _: board)

    def undo(self) -> None:
        """Take the last change back."""
        with self.lock:
            self._refuse_while_running()
            if not self._past:
                raise DataError("there is nothing to take back.")
            self._put(self._past.pop())

    def room(self, box: str | None) -> None:
        """Raise now what adding one image would raise, before it is sent."""
        with self.lock:
            self._refuse_while_running()
            self._check(self.board.with_image("", box=box))

    def _put(self, board: Board) -> None:
        self.board = board
        needed = {image for known in (*self._past, board) for image in known.images}
        self.images = {key: kept for key, kept in self.images.items() if key in needed}

    def _refuse_while_running(self) -> None:
        if self.job is not None and self.job.running:
            raise DataError(
                "queries are being answered.", hint="Wait until it is done, or cancel it."
            )

    def _check(self, board: Board) -> None:
        support = sum(len(box.images) for box in board.boxes)
        for what, count, most in (
            ("classes", len(board.boxes), self.limits.classes),
            ("support images", support, self.limits.support),
            ("queries", len(board.queries), self.limits.queries),
        ):
            if count > most:
                raise ResourceError(f"the page takes at most {most} {what}.")


@final
class Sessions:
    """The sessions of a server; the least recently used one gives way."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._all: dict[str, Session] = {}

    def new(self) -> str:
        """Begin a session and return its key."""
        with self._lock:
            while len(self._all) >= self.limits.sessions:
                oldest = min(self._all, key=lambda key: self._all[key].used)
                job = self._all.pop(oldest).job
                if job is not None:
                    job.cancelled = True
            key = new_key()
            self._all[key] = Session(self.limits)
            return key

    def forget_answers(self, *, but: Session | None = None) -> None:
        """Forget the answers of all sessions, except one."""
        with self._lock:
            for session in self._all.values():
                if session is not but:
                    session.forget_answers()

    def find(self, key: str) -> Session | None:
        """Find a session; None if it gave way or never was."""
        with self._lock:
            found = self._all.get(key)
            if found is not None:
                found.used = time.monotonic()
            return found


def new_key() -> str:
    """Draw a key that nobody can guess."""
    return secrets.token_urlsafe(9)
