"""k nearest neighbours and their weights on Python lists."""

import math


def squared_distance(a: list[float], b: list[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def nearest(key: list[float], slot_keys: list[list[float]], k: int | None) -> list[int]:
    """Slots of the k nearest keys by (distance, slot)."""
    ranked = sorted((squared_distance(key, other), slot) for slot, other in enumerate(slot_keys))
    return [slot for _, slot in ranked[:k]]


def softmax_weights(
    squared: list[float], temperature: float, *, null_distance: float | None = None
) -> list[float]:
    """``exp(-d_j^2 / tau)`` over their sum; a null slot joins the sum and is left out."""
    terms = [math.exp(-d / temperature) for d in squared]
    null = 0.0 if null_distance is None else math.exp(-(null_distance**2) / temperature)
    return [term / (sum(terms) + null) for term in terms]
