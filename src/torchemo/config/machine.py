"""Where a command computes: options that say nothing about the run, and change no name of a result."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

Precision: TypeAlias = Literal["float32", "tf32", "bf16"]
"""What products of networks are computed in; everything else is float32."""


@final
@dataclass(frozen=True)
class Machine:
    """Where a command computes, and how precisely."""

    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, mps, xpu, or auto (the accelerator of this machine, else the CPU).
    No GPU has run torchemo yet: check yours with torchemo doctor --device cuda."""
    precision: Precision = "float32"
    """Products of the network: float32; tf32 (10 bits, NVIDIA); bf16 (7 bits, networks of images). Both are
    faster on hardware that has them, and change results."""


CPU_ALONE = Machine()
"""The CPU, in float32."""
