"""The tables T1 to T9 and the figures F1 to F7 of the paper, each as a study, and our own R1 to R7."""

import difflib
from types import MappingProxyType

from torchemo.errors import ConfigError
from torchemo.study.entries.comparisons import COMPARISONS
from torchemo.study.entries.figures import FIGURES
from torchemo.study.entries.fresh import R2, R3, R6, R7
from torchemo.study.entries.limits import R4, R5
from torchemo.study.entries.readings import R1
from torchemo.study.entries.tables import TABLES
from torchemo.study.entry import Entry

ENTRIES: MappingProxyType[str, Entry] = MappingProxyType(
    {entry.name: entry for entry in (*TABLES, *COMPARISONS, *FIGURES, R1, R2, R3, R4, R5, R6, R7)}
)


def entry_of(name: str) -> Entry:
    """Return an entry by its name, in any case.

    Raises:
        ConfigError: There is none; suggests the nearest.
    """
    found = ENTRIES.get(name.upper())
    if found is None:
        near = difflib.get_close_matches(name.upper(), ENTRIES, n=1, cutoff=0.4)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"there is no study '{name}'.", hint=f"{hint}There are: {', '.join(ENTRIES)}."
        )
    return found
