"""Episodic memory for few-shot meta-learning, in PyTorch.

The names below are the public surface: what your own loop needs (`EMO`, `OffsetMemory`, `for_module`, ...),
networks, meta-training, and whole runs (`train`, `load`, `compare`). They are loaded on first use, so that
importing the package, and asking a command for help, does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchemo.config.presets import preset as preset
    from torchemo.core.errors import TorchemoError as TorchemoError
    from torchemo.core.types import Episode as Episode
    from torchemo.core.types import Recall as Recall
    from torchemo.core.types import TaskShape as TaskShape
    from torchemo.interop import apply_ as apply_
    from torchemo.interop import for_module as for_module
    from torchemo.memory.aggregators import Gated as Gated
    from torchemo.memory.aggregators import Mean as Mean
    from torchemo.memory.aggregators import Sum as Sum
    from torchemo.memory.controllers import FIFO as FIFO
    from torchemo.memory.controllers import LRU as LRU
    from torchemo.memory.controllers import Clock as Clock
    from torchemo.memory.emo import EMO as EMO
    from torchemo.memory.keys.transformer import TransformerKey as TransformerKey
    from torchemo.memory.offsets import OffsetMemory as OffsetMemory
    from torchemo.memory.store import EpisodicMemory as EpisodicMemory
    from torchemo.models import MLP as MLP
    from torchemo.models import Conv4 as Conv4
    from torchemo.models import ResNet12 as ResNet12
    from torchemo.models import lift as lift
    from torchemo.runs.experiment import build_trainer as build_trainer
    from torchemo.runs.run import compare as compare
    from torchemo.runs.run import load as load
    from torchemo.runs.run import train as train
    from torchemo.training.evaluate import evaluate as evaluate
    from torchemo.training.predict import predict as predict
    from torchemo.training.step import outer_step as outer_step
    from torchemo.training.trainer import Trainer as Trainer

_HOME = {
    "config.presets": ("preset",),
    "core.errors": ("TorchemoError",),
    "core.types": (
        "Recall",
        "Episode",
        "TaskShape",
    ),
    "interop": (
        "apply_",
        "for_module",
    ),
    "memory.aggregators": (
        "Gated",
        "Mean",
        "Sum",
    ),
    "memory.controllers": (
        "FIFO",
        "LRU",
        "Clock",
    ),
    "memory.emo": ("EMO",),
    "memory.keys.transformer": ("TransformerKey",),
    "memory.offsets": ("OffsetMemory",),
    "memory.store": ("EpisodicMemory",),
    "models": (
        "MLP",
        "Conv4",
        "ResNet12",
        "lift",
    ),
    "runs.experiment": ("build_trainer",),
    "runs.run": (
        "compare",
        "load",
        "train",
    ),
    "training.evaluate": ("evaluate",),
    "training.predict": ("predict",),
    "training.step": ("outer_step",),
    "training.trainer": ("Trainer",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'torchemo' has no attribute '{name}'")
    return getattr(importlib.import_module(f"torchemo.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
