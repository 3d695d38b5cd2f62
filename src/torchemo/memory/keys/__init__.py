"""Task keys (Eq. 4) and how they are trained."""

from torchemo.config.registry import Registry

KEYS = Registry(
    "key",
    "memory.key",
    {
        "transformer": "torchemo.memory.keys.transformer:TransformerKey",
        "mean": "torchemo.memory.keys.transformer:MeanKey",
        "statistics": "torchemo.memory.keys.statistics:StatisticsKey",
        "learned-statistics": "torchemo.memory.keys.statistics:StatisticsNetwork",
        "learner": "torchemo.memory.keys.encoder:LearnerKey",
    },
    group="torchemo.keys",
)
