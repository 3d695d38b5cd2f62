"""An adapted classifier as one module: images 0 .. 255 in, probabilities out."""

from typing import final

import torch
from torch import Tensor, nn

from torchemo.core.errors import ConfigError
from torchemo.models.alone import BesideSupport
from torchemo.runs.adapt import Adapted


@final
class AdaptedNetwork(nn.Module):
    """Answer images as `torchemo.runs.adapt.Adapted` does, with everything inside that comes before.

    Maps ``uint8 [batch, channels, height, width]`` to probabilities ``[batch, classes]``. Whatever the
    network normalises with is fixed: no answer depends on the other images of a batch.

    Args:
        adapted: A run fitted to a support set.

    Raises:
        ConfigError: The network shows every query beside the support set.
    """

    def __init__(self, adapted: Adapted) -> None:
        super().__init__()
        self.classifier = adapted.classifier
        self.invert = adapted.form.invert
        self.trunk = adapted.trained.network
        # Inside, so that the module counts their weights as its own.
        self.trunk_module = None if self.trunk is None else self.trunk.module
        shape = (1, adapted.form.channels, adapted.form.height, adapted.form.width)
        with (
            torch.no_grad()
        ):  # what the first answer computes of the support set is a constant then
            self(torch.zeros(shape, dtype=torch.uint8))
        fitted = self.classifier.fitted
        found = (fitted.alone or {}).values()
        if any(isinstance(network, BesideSupport) for network, _ in found):
            raise ConfigError(
                "this run shows every query to its network beside the support set, which a file with a"
                " network alone cannot do.",
                hint="Export a run that was trained with another model.bn, such as group.",
            )

    def forward(self, images: Tensor) -> Tensor:
        """Return the probabilities of all classes."""
        x = images.float()
        x = 255 - x if self.invert else x
        x = x / 255 if self.trunk is None else self.trunk.features_of(x)
        fitted, learner = self.classifier.fitted, self.classifier.learner
        return learner.predict(fitted, x[None])[0].softmax(1)
