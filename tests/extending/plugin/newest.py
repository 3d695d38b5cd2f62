"""A controller of another distribution: forget what was written last."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Newest:
    """Overwrite the slot with the newest write."""

    @classmethod
    def build(cls, options, *, seed):
        """Make the controller."""
        return cls()

    def touch(self, ledger, slots):
        """Note a recall."""
        ledger.stamp_access(slots)

    def victim(self, ledger):
        """Return the slot with the newest write."""
        return ledger.newest("written")

    def wrote(self, ledger, slot):
        """Note a write."""
        ledger.stamp_write(slot)
