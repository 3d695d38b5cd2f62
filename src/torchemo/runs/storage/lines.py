"""Lines of JSON that carry digests: of themselves, and of the line that each was written after.

A line ends with ``"digest": "<16 hex digits of the line><8 of the one before>"``. A changed line is
damaged. A line that is missing, doubled or moved leaves a gap. Two earlier forms are read: 16 digits alone,
and no digest. A log may begin with such lines, because runs of earlier versions go on.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_DIGEST = "digest"
_TRACE = re.compile(rb'[0-9a-f]{8}[^"]{0,16}"}\n\Z|digest": "')
"""What a line with a digest has, also if much of the name and the digest is damaged."""
_OWN, _LINK = 16, 8


class Line(NamedTuple):
    """A line as it was found.

    Attributes:
        raw: Its bytes.
        event: What it says; None if it is damaged.
        gap: Whether it is sound, and what stands before it is not what it was written after.
    """

    raw: bytes
    event: dict[str, Any] | None
    gap: bool = False


class _Read(NamedTuple):
    """A line by itself: ``link`` is None without any digest, and empty if the digest has none."""

    event: dict[str, Any] | None
    link: str | None


def sealed(event: Mapping[str, Any], before: bytes) -> bytes:
    """Write an event with its digests as last entry; ``before`` is the line that it follows."""
    return _with(event, _hex(before, _LINK))


def parse(raws: Sequence[bytes], *, earlier: bool) -> list[Line]:
    """Read lines with their ends.

    Args:
        raws: The lines.
        earlier: Whether they may be of a version that wrote no digests.
    """
    found = [_read(raw) for raw in raws]
    digested = [i for i, one in enumerate(found) if one.event is not None and one.link is not None]
    first = min(digested, default=len(raws))
    if not earlier or (not digested and any(_TRACE.search(raw) for raw in raws)):
        first = 0  # all digests were destroyed: nothing says what a line was
    parsed, seen = [], set[bytes]()
    for i, (raw, one) in enumerate(zip(raws, found, strict=True)):
        if one.link is None:
            taken = i < first and _vouched(raws, found, i, first)
            parsed.append(Line(raw, one.event if taken else None))
            continue
        double = one.event is not None and raw in seen
        seen.add(raw)
        parsed.append(Line(raw, None if double else one.event, _gap(raws, found, parsed, i)))
    return parsed


def resealed(lines: Sequence[Line]) -> bytes:
    """Write sound lines anew, each after the one that is now before it."""
    before, written = b"", []
    for line in lines:
        if line.event is not None:
            plain = _read(line.raw).link is None
            before = line.raw if plain else sealed(line.event, before)
            written.append(before)
    return b"".join(written)


def _vouched(raws: Sequence[bytes], found: Sequence[_Read], i: int, first: int) -> bool:
    """Return whether a line without digest may be of an earlier version.

    The next line was written after it and says so. Otherwise it may be a line whose digest was destroyed.
    """
    if first == len(raws) or not found[first].link:
        return True  # no line says what it was written after
    if i + 1 == first:
        return found[first].link == _hex(raws[i], _LINK)
    return found[i + 1].event is not None


def _gap(raws: Sequence[bytes], found: Sequence[_Read], parsed: Sequence[Line], i: int) -> bool:
    """Return whether a sound line stands after another than the one it was written after."""
    if found[i].event is None or not found[i].link:
        return False
    known = i == 0 or parsed[i - 1].event is not None  # a damaged line is named already
    return known and found[i].link != _hex(raws[i - 1] if i else b"", _LINK)


def _read(raw: bytes) -> _Read:
    """Read one line by itself; its event is None if it is damaged."""
    try:
        event = json.loads(raw)
        digest = event.pop(_DIGEST, None)
        if digest is not None or _TRACE.search(raw) is not None:
            link = digest[_OWN:]
            if len(link) not in (0, _LINK) or raw != _with(event, link):
                return _Read(None, "")
        else:
            link = None
        if isinstance(event["event"], str) and type(event["step"]) is int:
            return _Read(dict(event), link)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return _Read(None, "")


def _with(event: Mapping[str, Any], link: str) -> bytes:
    text = json.dumps(event, allow_nan=False)
    return f'{text[:-1]}, "{_DIGEST}": "{_hex((text + link).encode(), _OWN)}{link}"}}\n'.encode()


def _hex(data: bytes, digits: int) -> str:
    return hashlib.sha256(data).hexdigest()[:digits]
