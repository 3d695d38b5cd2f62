"""The demo: curves that come back, five new points at a time, with and without memory.

MAML and MAML with a memory of offsets learn from curves of four families. Then unseen curves are visited
several times. A lifelong memory keeps gradients of every visit and no points; replay keeps all points.
"""

from torchemo.lab.demo.runs import DemoConfig
from torchemo.lab.demo.show import run_demo

__all__ = ["DemoConfig", "run_demo"]
