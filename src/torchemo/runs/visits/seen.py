"""What a store says of the classes at hand, in data and in words."""

from typing import Any, NamedTuple

from torchemo.memory.lifelong.shares import NAMED


class SeenClass(NamedTuple):
    """A class at hand, and what is known of it.

    Attributes:
        name: Its name now.
        known: Its name in the store; None for a class that is new.
        visits: How often it was there before.
        share: How probable that is by its images, or that it is any known class if it has no known name;
            None where names say so.
    """

    name: str
    known: str | None
    visits: int
    share: float | None = None


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
        if any(one.share is not None for one in self.classes):
            return self._probable
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

    @property
    def _probable(self) -> str:
        """Say it where images alone are asked, which are never quite sure."""
        if not self.visits:
            return "" if self.repeated else "Not seen before, as far as images tell."
        each = "; ".join(map(_probably, self.classes))
        last = f" The last of these visits was on {day(self.last)}." if self.last else ""
        past = "1 past visit counts" if self.visits == 1 else f"{self.visits} past visits count"
        return f"By their images: {each}. {past} by these probabilities.{last}"


def _probably(one: SeenClass) -> str:
    share = one.share or 0.0
    if one.known is not None:
        called = "" if one.known == one.name else f" as {one.known}"
        return f"{one.name} was probably seen {often(one.visits)}{called} ({share:.0%})"
    if share < NAMED:
        return f"{one.name} is probably new ({1 - share:.0%})"
    return f"{one.name} was probably seen ({share:.0%}), as which class is open"


def often(times: int) -> str:
    """Write how often something was."""
    return "once" if times == 1 else f"{times} times"


def day(when: str) -> str:
    """Return the day of a date and time."""
    return when[:10]
