"""Caches to compare controllers with: CLOCK on Python lists, FIFO and LRU from cachetools.

All of them keep ``content``, the item in each slot, and know two events: ``touch`` the slots of one
recall, nearest first, and ``write`` an item, which returns the slot it went to.
"""

from typing import Any

from cachetools import Cache, FIFOCache, LRUCache


class ListClock:
    """The clock algorithm, one inspection at a time."""

    def __init__(self, capacity: int, *, insert_ref: bool) -> None:
        self.capacity = capacity
        self.insert_ref = insert_ref
        self.content: list[Any] = []
        self.bits: list[bool] = []
        self.hand = 0

    def touch(self, slots: list[int]) -> None:
        for slot in slots:
            self.bits[slot] = True

    def write(self, item: Any) -> int:
        if len(self.content) < self.capacity:
            self.content.append(item)
            self.bits.append(self.insert_ref)
            return len(self.content) - 1
        slot = self.sweep()
        self.content[slot] = item
        self.bits[slot] = self.insert_ref
        return slot

    def sweep(self) -> int:
        inspections = 0
        while True:
            inspections += 1
            assert inspections <= self.capacity + 1
            at = self.hand
            self.hand = (self.hand + 1) % self.capacity
            if not self.bits[at]:
                return at
            self.bits[at] = False


class PublishedCache:
    """A cache of cachetools whose entries remember the slot they sit in."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.content: list[Any] = []

    def touch(self, slots: list[int]) -> None:
        # The nearest slot is accessed last, which makes it the most recent one.
        for slot in reversed(slots):
            self.cache[self.content[slot]]

    def write(self, item: Any) -> int:
        if len(self.cache) < self.cache.maxsize:
            slot = len(self.content)
            self.content.append(item)
        else:
            _, slot = self.cache.popitem()
            self.content[slot] = item
        self.cache[item] = slot
        return slot


def published_fifo(capacity: int) -> PublishedCache:
    return PublishedCache(FIFOCache(capacity))


def published_lru(capacity: int) -> PublishedCache:
    return PublishedCache(LRUCache(capacity))
