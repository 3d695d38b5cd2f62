"""EMO in higher's inner loop: the ``grad_callback`` of ``diffopt.step`` (higher 0.2.1)."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from torchemo.core.tree import detach
from torchemo.core.types import Params, Recall
from torchemo.interop.one_task import as_task, combine_one
from torchemo.memory.emo import EMO


@final
class Callback:
    """Map the list of gradients of an inner step to the list of combined ones, and count the steps.

    Attributes:
        gradients: Support gradients g_0, g_1, ... seen so far, ``{name: [1, *shape]}``, detached: higher
            shows them to nobody else, and `EMO.value` picks from them what to remember.
    """

    def __init__(self, emo: EMO, recall: Recall, names: Sequence[str], task: int | None) -> None:
        self.gradients: list[Params] = []
        self._emo, self._recall = emo, recall
        self._names, self._task = tuple(names), task

    def __call__(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return Aggr(g, V) of the next inner step (Eq. 7), on the graph of the gradients."""
        step = len(self.gradients)
        combined = combine_one(
            self._emo, grads, self._recall, step=step, task=self._task, names=self._names
        )
        self.gradients.append(detach(as_task(grads, names=self._names)))
        return combined


def callback(
    emo: EMO, recall: Recall, names: Sequence[str], *, task: int | None = None
) -> Callback:
    """Make the ``grad_callback`` of one task: ``diffopt.step(loss, grad_callback=...)``.

    Make one per task and inner loop: it counts the inner steps itself.

    Args:
        emo: The memory optimizer.
        recall: What was recalled for this task, or for a batch of tasks.
        names: Names of all parameters of the module, in the order of ``module.named_parameters()``.
        task: Which task of the batch this is; needed if the recall is of more than one.
    """
    return Callback(emo, recall, names, task)
