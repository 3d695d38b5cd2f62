"""Episodic Memory Optimization for few-shot meta-learning, in PyTorch.

The names below are the public surface; they are loaded on first use, so that importing the package,
and asking a command for help, does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchemo.aggregators import CoordinateTransformer as CoordinateTransformer
    from torchemo.aggregators import Gated as Gated
    from torchemo.aggregators import GateTransformer as GateTransformer
    from torchemo.aggregators import Mean as Mean
    from torchemo.aggregators import Sum as Sum
    from torchemo.build import build_emo as build_emo
    from torchemo.config import EMOConfig as EMOConfig
    from torchemo.config import LearnerConfig as LearnerConfig
    from torchemo.controllers import FIFO as FIFO
    from torchemo.controllers import LRU as LRU
    from torchemo.controllers import Clock as Clock
    from torchemo.emo import EMO as EMO
    from torchemo.encoders import TransformerKey as TransformerKey
    from torchemo.errors import TorchemoError as TorchemoError
    from torchemo.evaluate import evaluate as evaluate
    from torchemo.inner import adapt as adapt
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
    from torchemo.memory import EpisodicMemory as EpisodicMemory
    from torchemo.models import MLP as MLP
    from torchemo.models import Conv4 as Conv4
    from torchemo.models import ResNet12 as ResNet12
    from torchemo.models import lift as lift
    from torchemo.policy import Policy as Policy
    from torchemo.retrieval import Retrieval as Retrieval
    from torchemo.step import outer_step as outer_step
    from torchemo.step import predict as predict
    from torchemo.train import Trainer as Trainer
    from torchemo.types import Episode as Episode
    from torchemo.types import TaskShape as TaskShape

_HOME = {
    "aggregators": ("CoordinateTransformer", "GateTransformer", "Gated", "Mean", "Sum"),
    "build": ("build_emo",),
    "config": ("EMOConfig", "LearnerConfig"),
    "controllers": ("FIFO", "LRU", "Clock"),
    "emo": ("EMO",),
    "encoders": ("TransformerKey",),
    "errors": ("TorchemoError",),
    "evaluate": ("evaluate",),
    "inner": ("adapt",),
    "interop": ("apply_", "for_module"),
    "learners": ("MAML", "InnerLoop", "MAMLPlusPlus", "MetaSGD", "ProtoMAML", "Reptile", "anil"),
    "learners.build": ("build_learner",),
    "memory": ("EpisodicMemory",),
    "models": ("MLP", "Conv4", "ResNet12", "lift"),
    "policy": ("Policy",),
    "retrieval": ("Retrieval",),
    "step": ("outer_step", "predict"),
    "train": ("Trainer",),
    "types": ("Episode", "TaskShape"),
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
