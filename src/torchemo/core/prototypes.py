"""Class means of embedded examples."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.errors import DataError
from torchemo.core.losses import check_labels


def class_means(
    embedded: Float[Tensor, "task n e"], y: Int[Tensor, "task n"], *, n_way: int
) -> Float[Tensor, "task way e"]:
    """Average the embeddings of each class; every class of every task needs an example."""
    check_labels(y, n_way, what="support labels")
    member = F.one_hot(y.long(), n_way).to(embedded.dtype)
    count = member.sum(1)
    if (count == 0).any():
        b, c = (count == 0).nonzero()[0].tolist()
        raise DataError(
            f"support set of task {b}: class {c} has no example.",
            hint="Prototypes need at least one support example of every class.",
        )
    return member.transpose(1, 2) @ embedded / count[..., None]
