"""What lies on the page: boxes of support images, one per class, and queries. Boards never change."""

import unicodedata
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from torchemo.core.errors import DataError

LONGEST_NAME = 80
"""Characters of a class name."""

Content: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
"""Names of the classes and their images, in the order of labels: what answers depend on."""


@final
@dataclass(frozen=True)
class Box:
    """A class on the page: its key, its name, and the keys of its images."""

    key: str
    name: str
    images: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Board:
    """Boxes in the order in which they were added, and the keys of the queries."""

    boxes: tuple[Box, ...] = ()
    queries: tuple[str, ...] = ()

    @property
    def images(self) -> tuple[str, ...]:
        """Return the keys of all images."""
        return (*(image for box in self.boxes for image in box.images), *self.queries)

    @property
    def support(self) -> Content:
        """Return the classes that have images; labels follow the sorted names, as in ``adapt``."""
        return tuple(sorted((box.name, box.images) for box in self.boxes if box.images))

    def box(self, key: str) -> Box:
        """Find a box."""
        for box in self.boxes:
            if box.key == key:
                return box
        raise DataError("this class is no longer there.", hint="Another tab may have removed it.")

    def with_box(self, key: str, name: str | None = None) -> "Board":
        """Add an empty box; without a name it gets a free one."""
        box = Box(key, self._free_name() if name is None else self._checked(name))
        return replace(self, boxes=(*self.boxes, box))

    def renamed(self, key: str, name: str) -> "Board":
        """Rename a box."""
        box = self.box(key)
        return self._with(box, replace(box, name=self._checked(name, besides=key)))

    def without_box(self, key: str) -> "Board":
        """Remove a box and its images."""
        box = self.box(key)
        return replace(self, boxes=tuple(b for b in self.boxes if b is not box))

    def with_image(self, image: str, *, box: str | None) -> "Board":
        """Add an image to a box, or to the queries."""
        if box is None:
            return replace(self, queries=(*self.queries, image))
        found = self.box(box)
        return self._with(found, replace(found, images=(*found.images, image)))

    def without_image(self, image: str) -> "Board":
        """Remove an image wherever it lies."""
        if image not in self.images:
            raise DataError("this image is no longer there.")
        boxes = (replace(b, images=tuple(i for i in b.images if i != image)) for b in self.boxes)
        return Board(tuple(boxes), tuple(q for q in self.queries if q != image))

    def _with(self, old: Box, new: Box) -> "Board":
        return replace(self, boxes=tuple(new if box is old else box for box in self.boxes))

    def _free_name(self) -> str:
        taken = {box.name for box in self.boxes}
        return next(n for i in range(1, len(taken) + 2) if (n := f"class {i}") not in taken)

    def _checked(self, name: str, *, besides: str | None = None) -> str:
        """Return a class name that can also be the name of a folder, in Unicode form C."""
        plain = unicodedata.normalize("NFC", name).strip()
        if not plain or len(plain) > LONGEST_NAME:
            raise DataError(f"a class name has 1 to {LONGEST_NAME} characters.")
        if plain[0] == "." or set(plain) & set("/\\") or not plain.isprintable():
            raise DataError(
                f"{plain!r} cannot name a class: it becomes the name of a folder.",
                hint="Leave out slashes and a dot at the beginning.",
            )
        if plain in {box.name for box in self.boxes if box.key != besides}:
            raise DataError(f"there is already a class named {plain!r}.")
        return plain
