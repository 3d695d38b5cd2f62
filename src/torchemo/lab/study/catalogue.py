"""The tables T1 to T9 and the figures F1 to F7 of the paper, each as a study, and our own R1 to R7."""

import difflib
from types import MappingProxyType

from torchemo.core.errors import ConfigError
from torchemo.lab.study.entry import Entry
from torchemo.lab.study.own.fresh import R2, R3, R6, R7
from torchemo.lab.study.own.limits import R4, R5
from torchemo.lab.study.own.variants import R1
from torchemo.lab.study.paper.figures import FIGURES
from torchemo.lab.study.paper.t1_to_t6 import TABLES
from torchemo.lab.study.paper.t7_to_t9 import COMPARISONS

ENTRIES: MappingProxyType[str, Entry] = MappingProxyType(
    {entry.name: entry for entry in (*TABLES, *COMPARISONS, *FIGURES, R1, R2, R3, R4, R5, R6, R7)}
)


def entry_of(name: str) -> Entry:
    """Return an entry by its name, in any case."""
    found = ENTRIES.get(name.upper())
    if found is None:
        near = difflib.get_close_matches(name.upper(), ENTRIES, n=1, cutoff=0.4)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"there is no study '{name}'.", hint=f"{hint}There are: {', '.join(ENTRIES)}."
        )
    return found
