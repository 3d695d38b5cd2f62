"""What a store says of the classes at hand, in data and in words."""

from typing import Any, NamedTuple


class SeenClass(NamedTuple):
    """A class at hand, and what is known of it.

    Attributes:
        name: Its name now.
        known: Its name in the store; None for a class that is new.
        visits: How often it was there before.
    """

    name: str
    known: str | None
    visits: int


class Seen(NamedTuple):
    """What a store says of the classes at hand.

    Attributes:
        classes: Each class, in label order.
        visits: Past visits that were recalled.
        last: Date and time of the last of them; empty if there is none.
        repeated: Date and time of an earlier visit of the very same images, which is not recalled: they
            are counted once. Empty if there is none.
    """

    classes: tuple[SeenClass, ...]
    visits: int
    last: str
    repeated: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        classes = [one._asdict() for one in self.classes]
        return {**self._asdict(), "classes": classes, "words": self.words}

    @property
    def words(self) -> str:
        """Say it in one sentence."""
        return " ".join(filter(None, (self._again, self._known)))

    @property
    def _again(self) -> str:
        if not self.repeated:
            return ""
        return f"These images are in the store since {day(self.repeated)}, and count once."

    @property
    def _known(self) -> str:
        old = [one for one in self.classes if one.known is not None]
        if not old:
            return "" if self.repeated else "Not seen before."
        times = {one.visits for one in old}
        last = f"last on {day(self.last)}"
        if len(times) == 1:
            new = [one.name for one in self.classes if one.known is None]
            rest = f" New: {', '.join(new)}." if new else ""
            part = "" if not new else f"{len(old)} of {len(self.classes)} classes were "
            said = f"{part}seen {often(times.pop())}, {last}."
            return said[0].upper() + said[1:] + rest
        each = (f"{one.name} {often(one.visits) if one.known else 'never'}" for one in self.classes)
        return f"Seen: {', '.join(each)}; {last}."


def often(times: int) -> str:
    """Write how often something was."""
    return "once" if times == 1 else f"{times} times"


def day(when: str) -> str:
    """Return the day of a date and time."""
    return when[:10]
