"""JSON texts that carry the SHA-256 of themselves: every flipped bit is noticed."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from torchemo.core.errors import CheckpointError, DataError

_END = b"\n}\n"
_SEAL = re.compile(rb',\n "seal": "([0-9a-f]{64})"\n}\n\Z')


def seal(body: Mapping[str, Any]) -> bytes:
    """Write ``body`` with the SHA-256 of the text without it as last entry, in every format version."""
    text = json.dumps(body, indent=1, allow_nan=False).encode() + b"\n"
    return text.removesuffix(_END) + b',\n "seal": "%s"' % _sha256(text) + _END


def unseal(raw: bytes, *, what: str) -> dict[str, Any]:
    """Compare the seal with the text before any of it is understood: every byte counts."""
    found = _SEAL.search(raw)
    if found is None or _sha256(raw[: found.start()] + _END) != found[1]:
        raise CheckpointError(f"{what} is damaged: its content does not match its seal.")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON ({error!s:.200}).") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{what} should be a JSON object, got a {type(body).__name__}.")
    return body


SHA256 = 64
"""Digits of a digest."""


def with_digest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the SHA-256 of its content, for files that people read as they are."""
    return {**record, "sha256": _content(record)}


def without_digest(found: dict[str, Any], *, what: str) -> dict[str, Any]:
    """Return a record that is as it was written; those of earlier versions have no digest.

    Raises:
        DataError: It was changed.
    """
    last, value = next(reversed(found.items()), ("", None))
    # A record of an earlier version never ends with such a text: it is a digest with a damaged name.
    near = isinstance(value, str) and len(value) == SHA256 and last != "sha256"
    said = found.pop("sha256", None)
    if near or (said is not None and said != _content(found)):
        raise DataError(
            f"{what} was changed after it was written: its content does not fit its digest."
        )
    return found


def _content(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
