"""Which slot keys changed, so that an index can follow a memory without looking at all of its keys."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

LONGEST = 1 << 16
"""Entries kept; an index that fell further behind looks at all keys once."""


@final
class Journal:
    """The slots written, in order.

    It also knows which tensor it speaks of, and that tensor's version: keys that were changed or replaced
    behind its back count as all changed.

    Example:
        >>> import torch
        >>> keys, journal = torch.zeros(3, 2), Journal()
        >>> mark = journal.mark(keys)
        >>> keys[1] = 1.0
        >>> journal.wrote([1], keys)
        >>> journal.since(mark, keys)
        [1]
        >>> keys[0] = 1.0
        >>> journal.since(mark, keys) is None
        True
    """

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._dropped = 0
        self._keys: Tensor | None = None
        self._version = -1

    def wrote(self, slots: Sequence[int], keys: Tensor) -> None:
        """Note that these keys were just written, by one operation on ``keys``."""
        if self._keys is not keys or keys._version != self._version + 1:
            self._restart(keys)
        else:
            self._slots.extend(slots)
            self._version = keys._version
        if len(self._slots) > LONGEST:
            cut = len(self._slots) - LONGEST // 2
            self._slots, self._dropped = self._slots[cut:], self._dropped + cut

    def mark(self, keys: Tensor) -> int:
        """Return the present moment, for `since`."""
        if self._keys is not keys or keys._version != self._version:
            self._restart(keys)
        return self._dropped + len(self._slots)

    def since(self, mark: int, keys: Tensor) -> list[int] | None:
        """Return the slots written since ``mark``; None if any key may have changed."""
        known = self._keys is keys and keys._version == self._version
        return self._slots[mark - self._dropped :] if known and mark >= self._dropped else None

    def _restart(self, keys: Tensor) -> None:
        self._dropped += len(self._slots) + 1  # every earlier mark is too old
        self._slots, self._keys, self._version = [], keys, keys._version
