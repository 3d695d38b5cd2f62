"""ANIL: Almost No Inner Loop (Raghu, Raghu, Bengio, Vinyals, ICLR 2020)."""

from dataclasses import replace

from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML


def anil(loop: InnerLoop) -> MAML:
    """MAML that adapts the head only; features of a task are computed once.

    The trunk learns through the outer loop alone, exactly and cheaply: its gradient flows through the
    support features of every inner step and through the query features.
    """
    return MAML(replace(loop, adapts="head"))
