"""Aggregators: how recalled gradients V join the gradient g of the task at hand (Eq. 7 to 10).

`linear` holds Mean, Sum and Gated; `gate` and `coordinate` are two realisations of the Transformer.
"""

from torchemo.config.registry import Registry
from torchemo.memory.aggregators.aggregator import Aggregator as Aggregator
from torchemo.memory.aggregators.coordinate import CoordinateTransformer as CoordinateTransformer
from torchemo.memory.aggregators.gate import GateTransformer as GateTransformer
from torchemo.memory.aggregators.linear import Gated as Gated
from torchemo.memory.aggregators.linear import Mean as Mean
from torchemo.memory.aggregators.linear import Sum as Sum
from torchemo.memory.aggregators.parts import weighted_sum as weighted_sum

AGGREGATORS = Registry(
    "aggregator",
    "memory.aggregator",
    {
        "mean": "torchemo.memory.aggregators.linear:Mean",
        "sum": "torchemo.memory.aggregators.linear:Sum",
        "gated": "torchemo.memory.aggregators.linear:Gated",
        "gate": "torchemo.memory.aggregators.gate:GateTransformer",
        "coordinate": "torchemo.memory.aggregators.coordinate:CoordinateTransformer",
    },
    group="torchemo.aggregators",
)
