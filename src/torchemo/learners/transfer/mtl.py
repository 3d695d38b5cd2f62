"""MTL: Meta-Transfer Learning for few-shot learning (Sun, Liu, Chua, Schiele, CVPR 2019)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, final

import torch

from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.base import GradientLearner
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.learner import scoped, within

SCALE = "scale/"
"""Prefix of a kernel's scales among the meta-parameters."""


@final
@dataclass(frozen=True)
class MTLOptions(LoopOptions):
    """Options of MTL."""

    inner_lr: float = 0.01
    """alpha, on the mean support loss; 0.005 in the authors' first code, 0.01 in their second."""
    steps: int = 20
    """Inner steps of the head while training (published: 20, and 100 in the second code)."""
    order: Literal[1, 2] = 1
    """1 as in the authors' PyTorch code: scales learn through the queries alone. 2 keeps the graph."""
    scale_shortcuts: bool = False
    """Scale 1x1 kernels, too; the authors leave shortcuts as they are."""


@final
@dataclass(frozen=True)
class MTL(GradientLearner):
    """Adapt the head to the features of a frozen trunk, whose kernels a learned factor scales.

    A kernel W becomes ``W o Phi_1`` with one factor per pair of output and input channel, ``Phi_1 [O, I, 1,
    1]``, 1 at first. Inner steps move the head alone; the outer loop learns Phi_1, the shifts and the head's
    start. Kernels stay as a dense stage has left them (``train.dense``, or ``train.start_from``). Without
    one they are random.

    Choice: the paper's shift Phi_2 of every output channel is that of the normalisation after the
    convolution, which would undo any other; it learns together with the normalisation's scale. Where nothing
    is normalised, Phi_2 is the bias. The paper's hard-task meta-batch is left out: its code is not public.

    Args:
        loop: The inner loop.
        scale_shortcuts: Scale 1x1 kernels, too.
    """

    title: ClassVar[str] = "MTL"
    Options: ClassVar[type[LoopOptions]] = MTLOptions
    fixed: ClassVar[dict[str, Any]] = {"adapts": "head"}

    scale_shortcuts: bool = False

    @cached_property
    def kernels(self) -> dict[str, torch.Size]:
        """Shapes of the kernels that are scaled, by name."""
        theta, head = self.model.init(torch.Generator()), set(self.model.head)
        return {
            n: p.shape
            for n, p in theta.items()
            if p.dim() > 1 and n not in head and n not in self.model.buffers
            if self.scale_shortcuts or p.shape[2:] != (1, 1)
        }

    def init(self, generator: torch.Generator) -> Params:
        """Draw the network; scales are 1, so that it is at first the pretrained one."""
        theta = super().init(generator)
        ones = {
            n: torch.ones(*s[:2], *(1 for _ in s[2:]), device=generator.device)
            for n, s in self.kernels.items()
        }
        return {**theta, **within(SCALE, ones)}

    def trains(self, name: str) -> bool:
        """Return whether episodes move this meta-parameter: kernels stay, and biases that a shift undoes."""
        model = self.model
        if name.startswith(SCALE) or name in (*model.head, *model.norm, *model.buffers):
            return True
        return name.endswith(".bias") and not model.norm

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin with scaled kernels; what a memory adds to a kernel is scaled as well."""
        scales = scoped(params, SCALE)
        gates = {n: scales[n].expand(len(support.x), *s) for n, s in self.kernels.items()}
        theta = {n: p * gates[n] if n in gates else p for n, p in base.items()}
        return Start(theta, gates=gates)
