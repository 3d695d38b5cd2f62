"""Auto-encoders of a set of vectors: one vector for all, and how badly the set can be told from it."""

from dataclasses import dataclass
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Params
from torchemo.learners.gradient.parts.initial import Draw, linear, weight
from torchemo.learners.learner import scoped, within


@final
@dataclass(frozen=True)
class SequenceAutoencoder:
    """Read the vectors in order with a GRU; the code is the mean of its outputs.

    A second GRU starts from the encoder's last state and writes the sequence backwards, fed with zeros
    first and then with what it wrote; the loss is the mean squared error.

    Choice: torch's GRU cell applies the reset gate after the recurrent product, the published code's
    before it. Reset and update gates begin with bias 1 as there.
    """

    inside: int
    dim: int
    draw: Draw = "glorot"

    def init(self, generator: torch.Generator) -> Params:
        """Draw both cells and the projection."""
        cells = {name: self._cell(generator) for name in ("encoder/", "decoder/")}
        out = linear(self.dim, self.inside, generator, draw=self.draw)
        parts = [*cells.items(), ("out/", out)]
        return {name: t for scope, part in parts for name, t in within(scope, part).items()}

    def __call__(
        self, params: Params, vectors: Float[Tensor, "task n inside"]
    ) -> tuple[Float[Tensor, "task dim"], Float[Tensor, " task"]]:
        """Return codes and reconstruction losses."""
        state = vectors.new_zeros(len(vectors), self.dim)
        outputs = []
        for step in vectors.unbind(1):
            state = _gru(scoped(params, "encoder/"), step, state)
            outputs.append(state)
        code = torch.stack(outputs).mean(0)
        written, backwards = torch.zeros_like(vectors[:, 0]), []
        for _ in outputs:
            state = _gru(scoped(params, "decoder/"), written, state)
            written = F.linear(state, params["out/weight"], params["out/bias"])
            backwards.append(written)
        restored = torch.stack(backwards[::-1], dim=1)
        return code, (restored - vectors).square().mean((1, 2))

    def _cell(self, generator: torch.Generator) -> Params:
        own = (3 * self.dim, self.inside), (3 * self.dim, self.dim)
        bias = torch.tensor([1.0, 1.0, 0.0], device=generator.device).repeat_interleave(self.dim)
        return {
            "input": weight(own[0], generator, draw="glorot"),
            "state": weight(own[1], generator, draw="glorot"),
            "bias": bias,
        }


@final
@dataclass(frozen=True)
class MeanAutoencoder:
    """Encode each vector by itself and average: a code that does not depend on their order.

    Encoder: linear 96, ReLU, linear ``dim``, ReLU; decoder: linear 96, ReLU, linear; half the mean squared
    error. The code is one more linear layer with ReLU on the mean of the encodings.
    """

    inside: int
    dim: int
    hidden: int = 96

    def init(self, generator: torch.Generator) -> Params:
        """Draw all layers."""
        sizes = {
            "encode1": (self.inside, self.hidden),
            "encode2": (self.hidden, self.dim),
            "decode1": (self.dim, self.hidden),
            "decode2": (self.hidden, self.inside),
            "pooled": (self.dim, self.dim),
        }
        drawn = {name: linear(*size, generator) for name, size in sizes.items()}
        return {f"{n}/{part}": t for n, layer in drawn.items() for part, t in layer.items()}

    def __call__(
        self, params: Params, vectors: Float[Tensor, "task n inside"]
    ) -> tuple[Float[Tensor, "task dim"], Float[Tensor, " task"]]:
        """Return codes and reconstruction losses."""
        each = F.relu(_layer(params, F.relu(_layer(params, vectors, "encode1")), "encode2"))
        restored = _layer(params, F.relu(_layer(params, each, "decode1")), "decode2")
        code = F.relu(_layer(params, each.mean(1), "pooled"))
        return code, 0.5 * (restored - vectors).square().mean((1, 2))


SetAutoencoder: TypeAlias = SequenceAutoencoder | MeanAutoencoder
"""Maps the vectors of a task to one vector and a reconstruction loss."""


def _layer(params: Params, x: Tensor, name: str) -> Tensor:
    return F.linear(x, params[f"{name}/weight"], params[f"{name}/bias"])


def _gru(cell: Params, x: Tensor, state: Tensor) -> Tensor:
    none = torch.zeros_like(cell["bias"])
    return torch.gru_cell(x, state, cell["input"], cell["state"], cell["bias"], none)
