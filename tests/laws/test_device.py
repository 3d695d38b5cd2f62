"""Everything that trains a run stays on one device; the CPU gives the numbers it should have.

A new learner, aggregator or memory is a new case here, as in the rest of the law suite.
"""

from unittest.mock import patch

import pytest
import torch

from tests.laws import cases
from tests.pretend import on_pretend
from torchemo.config.run import OuterConfig
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.training.trainer import Trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize(("case", "memory_case"), cases.pairs(alone=True))
def test_a_device_trains_and_answers_as_the_cpu_does(case, memory_case):
    want = trained(case, memory_case, CPU)
    with on_pretend() as device:
        got = trained(case, memory_case, device)
    for group, tensors in want[0].items():
        for name, tensor in tensors.items():
            other = got[0][group][name]
            assert other.device == CPU
            torch.testing.assert_close(other, tensor, rtol=1e-6, atol=1e-8, msg=f"{group} {name}")
    torch.testing.assert_close(got[1].loss, want[1].loss)


def trained(case, memory_case, device):
    """Train, save, go on from what was saved in a trainer of its own, and evaluate."""
    first = trainer(case, memory_case, device)
    for seed in range(2):
        first.step(cases.make_episode(seed))
    second = trainer(case, memory_case, device)
    second.load_state_dict(first.state_dict())
    second.step(cases.make_episode(2))
    return second.state_dict(), second.system.evaluate([cases.make_episode(3)])


def trainer(case, memory_case, device):
    learner = cases.make_learner(case)
    memory = None if memory_case is None else cases.make_memory(memory_case, learner).to(device)
    keys = None if memory is None else SelfRecognition(memory.encoder, n_way=cases.N_WAY, older=3)
    # In float64, in which the devices agree to the last digits.
    params = cases.make_params(learner)
    with patch.object(type(learner), "init", lambda self, generator: dict(params)):
        return Trainer(
            learner,
            memory=memory,
            recognition=keys,
            config=OuterConfig(lr=0.01),
            batched=True,
            device=device,
        )
