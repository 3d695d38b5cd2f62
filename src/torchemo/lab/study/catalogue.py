"""The tables T1 to T9 and the figures F1 to F7 of the paper as studies, and our own: R, P and L."""

import difflib
from types import MappingProxyType

from torchemo.core.errors import ConfigError
from torchemo.lab.study.entry import Entry
from torchemo.lab.study.own.fresh import R2, R3, R6, R7
from torchemo.lab.study.own.limits import R4, R5
from torchemo.lab.study.own.pretrained import P1, P2
from torchemo.lab.study.own.variants import R1
from torchemo.lab.study.paper.figures import FIGURES
from torchemo.lab.study.paper.t1_to_t6 import TABLES
from torchemo.lab.study.paper.t7_to_t8 import COMPARISONS
from torchemo.lab.study.paper.t9 import T9
from torchemo.lab.study.streams.chosen import L8
from torchemo.lab.study.streams.entries import L1, L2, L3, L4
from torchemo.lab.study.streams.taught import L9
from torchemo.lab.study.streams.wider import L5, L6, L7

OWN = (R1, R2, R3, R4, R5, R6, R7, P1, P2, L1, L2, L3, L4, L5, L6, L7, L8, L9)

ENTRIES: MappingProxyType[str, Entry] = MappingProxyType(
    {entry.name: entry for entry in (*TABLES, *COMPARISONS, T9, *FIGURES, *OWN)}
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
