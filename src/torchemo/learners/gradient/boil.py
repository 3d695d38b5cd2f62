"""BOIL: Body Only update in Inner Loop (Oh, Yoo, Kim, Yun, ICLR 2021)."""

from dataclasses import replace

from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML


def boil(loop: InnerLoop) -> MAML:
    """MAML that adapts the body only: the representation changes, the head stays."""
    return MAML(replace(loop, adapts="body"))
