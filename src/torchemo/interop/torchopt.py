"""EMO as one link of a TorchOpt chain: ``torchopt.chain(transform(...), torchopt.sgd(lr))`` (0.7.3)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Recall
from torchemo.interop.one_task import combine_one
from torchemo.memory.emo import EMO

if TYPE_CHECKING:
    from torchopt.base import GradientTransformation


class StepState(NamedTuple):
    """State of the link: the number of inner steps taken, a scalar tensor."""

    step: Tensor


def transform(
    emo: EMO, recall: Recall, names: Sequence[str] | None = None, *, task: int | None = None
) -> "GradientTransformation":
    """Make the gradient transformation of one task, g -> Aggr(g, V) (Eq. 7).

    Put it first in the chain: it combines gradients, not updates. It works with functional optimizers and
    ``torchopt.FuncOptimizer``; as always there, ``inplace=False`` keeps the graph.

    Args:
        emo: The memory optimizer.
        recall: What was recalled for this task, or for a batch of tasks.
        names: Names of the tensors if the parameters are a tuple or list; a dict brings its own.
        task: Which task of the batch this is; needed if the recall is of more than one.
    """
    # Only whoever calls this needs TorchOpt to be installed.
    try:
        from torchopt.base import GradientTransformation
    except ImportError as missing:
        raise ConfigError(
            "TorchOpt is not installed.", hint="Run: pip install torchopt"
        ) from missing

    def init(params: Any) -> StepState:
        return StepState(torch.zeros((), dtype=torch.int64, device="cpu"))

    def update(
        updates: Any, state: StepState, *, params: Any = None, inplace: bool = True
    ) -> tuple[Any, StepState]:
        step = int(state.step)
        combined = combine_one(emo, updates, recall, step=step, task=task, names=names)
        return combined, StepState(state.step + 1)

    return GradientTransformation(init, update)
