"""The paper's own numbers: `PUBLISHED` holds what ``published.toml`` says of each table and figure."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import final


@final
@dataclass(frozen=True)
class Published:
    """Numbers of the paper as text: a header and rows, cells ``value``, ``value±half-width`` or ``-``."""

    csv: str
    read_off: bool = False
    unit: str = "accuracy, %"

    @property
    def header(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.csv.strip().splitlines()[0].split(",")) if self.csv else ()

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The rows, as printed."""
        return [tuple(line.split(",")) for line in self.csv.strip().splitlines()[1:]]

    def mean(self, column: str, **where: str) -> float:
        """Average a column over the rows whose other columns have these texts."""
        place = self.header.index(column)
        keys = {self.header.index(name): text for name, text in where.items()}
        found = [
            value(row[place]) for row in self.rows if all(row[i] == t for i, t in keys.items())
        ]
        return sum(found) / len(found)

    def gain(self, column: str, over: str, **where: str) -> float:
        """Average how much one column exceeds another."""
        return round(self.mean(column, **where) - self.mean(over, **where), 2)


def value(cell: str) -> float:
    """Read a printed cell without its interval.

    Example:
        >>> value("53.94±1.45")
        53.94
    """
    return float(cell.split("±")[0])


def _read() -> dict[str, Published]:
    text = files("torchemo.lab.study.paper").joinpath("published.toml").read_text("utf-8")
    return {name: Published(**given) for name, given in tomllib.loads(text).items()}


PUBLISHED: MappingProxyType[str, Published] = MappingProxyType(_read())
