"""Sizes of a simulated memory as a user types them: ``--slots 1e7 --value 1kB --index ivfpq``."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torchemo.core.errors import ConfigError

_UNITS = {"": 1, "B": 1, "kB": 1000, "KiB": 1024, "MB": 10**6, "MiB": 2**20}


@final
@dataclass(frozen=True)
class Asked:
    """What to simulate.

    Attributes:
        slots: T.
        value: Bytes of a value.
        index: How keys are searched.
        folder: Where files are made, and deleted afterwards.
    """

    slots: int
    value: int
    index: str
    folder: str


def asked(slots: str, value: str, index: str, folder: Path | None) -> Asked:
    """Read what a user typed: ``--slots 1e7 --value 1kB --index ivfpq``; refuse what cannot be simulated."""
    from torchemo.memory.scale.segment import stride_of
    from torchemo.memory.scale.segments import check_folder
    from torchemo.memory.search import INDICES
    from torchemo.runs.building.plan import whole_number

    count, size = whole_number(slots, "--slots"), _size(value)
    if index not in INDICES:
        raise ConfigError(f"--index should be one of {', '.join(INDICES)}, got {index!r:.40}.")
    INDICES[index]()  # says which extra is missing
    place = Path(tempfile.gettempdir()) if folder is None else folder
    # A version links files, and overwritten rows stay for a while.
    check_folder(place, int(1.3 * count * stride_of(size)), option="--folder")
    return Asked(count, size, index, str(place))


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\w*)", text.strip())
    size = float(found[1]) * _UNITS.get(found[2], 0) if found else 0
    if not 4 <= size <= 2**30:
        raise ConfigError(
            f"--value should be the size of a value, such as 1kB or 16kB, got {text!r:.40}."
        )
    return int(size) // 4 * 4
