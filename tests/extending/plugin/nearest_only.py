"""An aggregator of another distribution: add a share of the nearest recalled gradient."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class NearestOnlyOptions:
    """Options of NearestOnly."""

    share: float = 0.5
    """Factor of the recalled gradient."""


class NearestOnly(nn.Module):
    """Return ``g + share V_1``."""

    any_number = False
    Options = NearestOnlyOptions

    def __init__(self, share):
        super().__init__()
        self.share = share

    @classmethod
    def build(cls, options, joined):
        """Make the aggregator from its options."""
        return cls(options.share)

    def forward(self, grads, recall, *, step=0):
        """Combine own and recalled gradients."""
        moved = {n: v[:, 0] * self.share for n, v in recall.values.items() if n in grads}
        return {n: g + moved[n] if n in moved else g for n, g in grads.items()}

    def recall_only(self, recall, *, step=0):
        """Return the recalled part."""
        return {n: v[:, 0] * self.share for n, v in recall.values.items()}

    def own_only(self, grads):
        """Return the gradients themselves."""
        return dict(grads)
