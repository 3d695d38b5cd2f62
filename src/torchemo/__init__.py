"""Episodic Memory Optimization for few-shot meta-learning, in PyTorch.

The names below are the public surface; they are loaded on first use, so that importing the package,
and asking a command for help, does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchemo.config.run import EMOConfig as EMOConfig
    from torchemo.config.run import LearnerConfig as LearnerConfig
    from torchemo.core.errors import TorchemoError as TorchemoError
    from torchemo.core.types import Episode as Episode
    from torchemo.core.types import TaskShape as TaskShape
    from torchemo.interop import apply_ as apply_
    from torchemo.interop import for_module as for_module
    from torchemo.learners import MAML as MAML
    from torchemo.learners import InnerLoop as InnerLoop
    from torchemo.learners import MAMLPlusPlus as MAMLPlusPlus
    from torchemo.learners import MetaSGD as MetaSGD
    from torchemo.learners import ProtoMAML as ProtoMAML
    from torchemo.learners import Reptile as Reptile
    from torchemo.learners import anil as anil
    from torchemo.learners.build import build_learner as build_learner
    from torchemo.learners.gradient.inner import adapt as adapt
    from torchemo.memory.aggregators import CoordinateTransformer as CoordinateTransformer
    from torchemo.memory.aggregators import Gated as Gated
    from torchemo.memory.aggregators import GateTransformer as GateTransformer
    from torchemo.memory.aggregators import Mean as Mean
    from torchemo.memory.aggregators import Sum as Sum
    from torchemo.memory.controllers import FIFO as FIFO
    from torchemo.memory.controllers import LRU as LRU
    from torchemo.memory.controllers import Clock as Clock
    from torchemo.memory.emo import EMO as EMO
    from torchemo.memory.keys.encoder import TransformerKey as TransformerKey
    from torchemo.memory.policy import Policy as Policy
    from torchemo.memory.recall import Retrieval as Retrieval
    from torchemo.memory.store import EpisodicMemory as EpisodicMemory
    from torchemo.models import MLP as MLP
    from torchemo.models import Conv4 as Conv4
    from torchemo.models import ResNet12 as ResNet12
    from torchemo.models import lift as lift
    from torchemo.runs.build import build_emo as build_emo
    from torchemo.training.evaluate import evaluate as evaluate
    from torchemo.training.step import outer_step as outer_step
    from torchemo.training.step import predict as predict
    from torchemo.training.trainer import Trainer as Trainer

_HOME = {
    "memory.aggregators": ("CoordinateTransformer", "GateTransformer", "Gated", "Mean", "Sum"),
    "runs.build": ("build_emo",),
    "config.run": ("EMOConfig", "LearnerConfig"),
    "memory.controllers": ("FIFO", "LRU", "Clock"),
    "memory.emo": ("EMO",),
    "memory.keys.encoder": ("TransformerKey",),
    "core.errors": ("TorchemoError",),
    "training.evaluate": ("evaluate",),
    "learners.gradient.inner": ("adapt",),
    "interop": ("apply_", "for_module"),
    "learners": ("MAML", "InnerLoop", "MAMLPlusPlus", "MetaSGD", "ProtoMAML", "Reptile", "anil"),
    "learners.build": ("build_learner",),
    "memory.store": ("EpisodicMemory",),
    "models": ("MLP", "Conv4", "ResNet12", "lift"),
    "memory.policy": ("Policy",),
    "memory.recall": ("Retrieval",),
    "training.step": ("outer_step", "predict"),
    "training.trainer": ("Trainer",),
    "core.types": ("Episode", "TaskShape"),
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
