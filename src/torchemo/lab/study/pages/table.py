"""A table of texts."""

from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
