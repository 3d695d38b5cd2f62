"""Text files that come with published image sets: lists of names, numbers and pairs."""

import csv
from collections.abc import Mapping
from pathlib import Path

from torchemo.core.errors import DataError
from torchemo.data.listing import ListedClass, Picture


def classes_of(held: Mapping[str, list[Picture]], domain: str) -> tuple[ListedClass, ...]:
    """Make classes of images by name, without a split."""
    return tuple(ListedClass(name, held[name], None, domain) for name in sorted(held))


def lines(path: Path, *, missing_ok: bool = False) -> list[str]:
    """Read the lines of a text file that are not empty."""
    if missing_ok and not path.is_file():
        return []
    try:
        found = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    return [line.strip() for line in found if line.strip()]


def pairs(path: Path) -> dict[str, str]:
    """Read lines of a key and, after a space, a value."""
    found = [line.split(maxsplit=1) for line in lines(path)]
    short = [pair for pair in found if len(pair) != 2]
    if short:
        raise DataError(f"{path}: expected a number and a name in every line, got {short[0]}.")
    return dict(found)


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Read rows of a filename and a label."""
    rows = list(csv.DictReader(lines(path)))
    for row in rows:
        if not row.get("filename") or not row.get("label"):
            raise DataError(f"{path}: every row needs a filename and a label, got {row}.")
    return rows


def numbers_in(texts: list[str], count: int, *, path: Path) -> list[int]:
    """Read so many whole numbers."""
    try:
        numbers = [round(float(text)) for text in texts]
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}: expected numbers, got {texts}.") from error
    if len(numbers) != count:
        raise DataError(f"{path}: expected {count} numbers, got {texts}.")
    return numbers


def below(folder: Path, name: str, listed_in: Path) -> Path:
    """Join a name from a list to a folder, unless it leads elsewhere."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"{listed_in}: names an image outside its folder: {name!r}.")
    return folder / name
