"""EMO between ``loss.backward()`` and ``optimizer.step()`` of any ``torch.optim`` optimizer."""

import torch
from torch import nn

from torchemo.core.types import Params, Recall
from torchemo.interop.one_task import as_task, combine_one
from torchemo.memory.emo import EMO


def gradients(module: nn.Module) -> Params:
    """Copy the ``.grad`` of a module's parameters as one task, ``{name: [1, *shape]}``.

    Call it before `apply_`: what is remembered (Eq. 5) is the task's own gradient.
    """
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {name: grad.detach().clone() for name, grad in as_task(grads).items()}


def apply_(
    emo: EMO, module: nn.Module, recall: Recall, *, step: int = 0, task: int | None = None
) -> None:
    """Replace the ``.grad`` g of every parameter by Aggr(g, V) (Eq. 7); no graph is kept.

    Args:
        emo: The memory optimizer.
        module: The network of one task, after ``loss.backward()``.
        recall: What was recalled for this task, or for a batch of tasks.
        step: Inner step s.
        task: Which task of the batch this is; needed if the recall is of more than one.

    Example:
        >>> from torchemo.interop import for_module
        >>> net = nn.Linear(2, 1)
        >>> emo = for_module(net, k=5, capacity=10, key_dim=3)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> recall = emo.recall(torch.zeros(1, 3))
        >>> net(torch.ones(4, 2)).sum().backward()
        >>> own = gradients(net)
        >>> apply_(emo, net, recall)
        >>> optimizer.step()
        >>> emo.remember(recall, emo.value((own,)))
    """
    named = dict(module.named_parameters())
    # Optimizers step along `.grad` as it is: a graph behind it would only hold memory.
    with torch.no_grad():
        grads = {name: p.grad for name, p in named.items()}
        combined = combine_one(emo, grads, recall, step=step, task=task)
    for name, direction in combined.items():
        if direction is not None:
            named[name].grad = direction.to(named[name].dtype)
