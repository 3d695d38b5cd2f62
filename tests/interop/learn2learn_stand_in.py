"""The two names of learn2learn that a loop with EMO needs, for machines where it cannot be installed.

Same calls, same meaning: a clone's tensors are on the graph of the original ones, and an update reroutes
every tensor p of a module to p - lr g, in the order of ``module.parameters()``.
"""

import copy

from torch import Tensor, nn


def maml_update(model: nn.Module, lr: float, grads) -> nn.Module:
    for (name, p), g in zip(list(model.named_parameters()), grads, strict=True):
        _put(model, name, p - lr * g)
    return model


class MAML(nn.Module):
    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.module = model
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def clone(self) -> "MAML":
        copied = copy.deepcopy(self.module)
        for name, p in self.module.named_parameters():
            _put(copied, name, p.clone())
        return MAML(copied, self.lr)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = tensor
