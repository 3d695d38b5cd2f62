"""The method: keys, search, recall, combine, remember."""

from torchemo.config.registry import Registry

MEMORIES = Registry(
    "memory",
    "memory",
    {
        "none": "torchemo.memory.build:NoMemory",
        "gradients": "torchemo.memory.emo:EMO",
        "offsets": "torchemo.memory.offsets:OffsetMemory",
    },
    group="torchemo.memories",
)
