"""The demo: MAML against MAML with memory on the same embedded tasks, paired."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from torch import Tensor

from torchemo.build import TaskShape, build_emo, build_learner
from torchemo.config import (
    AggregatorConfig,
    EMOConfig,
    KeyConfig,
    LearnerConfig,
    MemoryConfig,
    RetrievalConfig,
    ValueConfig,
)
from torchemo.data.regression import RegressionSpec, sample_regression
from torchemo.emo import EMO
from torchemo.evaluate import Scores, batches, evaluate
from torchemo.models import MLP
from torchemo.recognition import SelfRecognition
from torchemo.stats import PairedDifference, paired_difference
from torchemo.train import Trainer
from torchemo.types import Episode


@final
@dataclass(frozen=True)
class DemoConfig:
    """Options of the demo."""

    iterations: int = 1500
    """Outer steps of each of the two runs."""
    tasks: int = 16
    """Tasks per outer step."""
    test_tasks: int = 1000
    """Test tasks, the same for both runs."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""


class DemoResult(NamedTuple):
    """Test losses of both runs on the same tasks, and their paired difference (memory minus base)."""

    base: Scores
    memory: Scores
    difference: PairedDifference


SPEC = RegressionSpec("hsml4", n_shot=10, n_query=10)
TASKS = TaskShape("regression", (1,), 1, n_shot=10)
LEARNER = LearnerConfig(inner_lr=0.003, steps=5)
EMO_OPTIONS = EMOConfig(
    memory=MemoryConfig(capacity=16, write="consolidate"),
    key=KeyConfig(embedder="pairs", layers=2, training="self_recognition"),
    retrieval=RetrievalConfig(k=None),
    aggregator=AggregatorConfig(kind="sum"),
    value=ValueConfig(content="meta"),
)


def run_demo(config: DemoConfig, *, progress: Callable[[str, int], None]) -> DemoResult:
    """Train both learners on the same tasks and compare them on the same test tasks.

    Args:
        config: Options.
        progress: Called with the run's name and its number of finished outer steps.
    """
    scores = {}
    for name in ("MAML", "MAML + EMO"):
        learner = build_learner(LEARNER, MLP(1, initializer="kaiming"), TASKS)
        emo: EMO | None = None
        recognition = None
        if name != "MAML":
            emo = build_emo(EMO_OPTIONS, learner, TASKS, seed=config.seed)
            if emo.encoder is not None:
                recognition = SelfRecognition(emo.encoder, lr=EMO_OPTIONS.key.recognition_lr)
        trainer = Trainer(learner, emo=emo, recognition=recognition, seed=config.seed, batched=True)
        for i in range(config.iterations):
            trainer.step(_sample("train", config.seed, i * config.tasks, config.tasks))
            progress(name, i + 1)
        test = batches(lambda s, n: _sample("test", 0, s, n), tasks=config.test_tasks, size=100)
        scores[name] = evaluate(learner, trainer.params, test, emo=emo, batched=True)
    base, memory = scores["MAML"], scores["MAML + EMO"]
    difference = paired_difference(_last(memory.loss), _last(base.loss), seed=config.seed)
    return DemoResult(base, memory, difference)


def _sample(split: str, seed: int, start: int, count: int) -> Episode:
    return sample_regression(SPEC, seed, split=split, start=start, count=count)


def _last(losses: Tensor) -> np.ndarray:
    return losses[:, -1].double().numpy()
