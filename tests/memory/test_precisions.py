"""Memories under other precisions and modes of torch than the usual one."""

import pytest
import torch

import torchemo
from torchemo.core.errors import ConfigError
from torchemo.core.losses import task_loss
from torchemo.core.types import Batch, Episode
from torchemo.learners.gradient.inner import differentiable
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.store import EpisodicMemory
from torchemo.models import MLP
from torchemo.training.trainer import Trainer


def combined(name, dtype):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2).to(dtype)
    emo = torchemo.for_module(net, k=2, capacity=5, key_dim=8, aggregator=name)
    keys = torch.nn.functional.normalize(torch.randn(3, 8), dim=1)
    values = {n: torch.randn(3, *p.shape).to(dtype) for n, p in net.named_parameters()}
    emo.remember(emo.recall(keys), values)
    grads = {n: torch.randn(3, *p.shape).to(dtype) for n, p in net.named_parameters()}
    return emo.combine(grads, emo.recall(keys), step=0)


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_come_back_in_their_own_precision(name, dtype):
    found, exact = combined(name, dtype), combined(name, torch.float32)
    bound = 0.05 if dtype.itemsize == 2 else 1e-4
    for n, tensor in found.items():
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor.float(), exact[n], rtol=bound, atol=bound)


def test_a_memory_written_in_inference_mode_is_written_again_outside():
    memory = EpisodicMemory(2, 2)
    with torch.inference_mode():
        memory.write(torch.eye(2), {"w": torch.ones(2, 1)})
    memory.write(torch.eye(2), {"w": torch.tensor([[3.0], [4.0]])})
    assert sorted(memory.read(torch.tensor([[0, 1]]))["w"].flatten().tolist()) == [3, 4]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused_in_words(mode):
    x = torch.rand(2, 10, 1)
    trainer = Trainer(MAML(InnerLoop(MLP(), loss=task_loss)))
    with mode(), pytest.raises(ConfigError, match="a training step needs gradients"):
        trainer.step(Episode(Batch(x, x.sin()), Batch(x, x.sin())))
    assert trainer.iteration == 0


def test_an_operation_that_is_differentiated_only_once_is_named():
    with pytest.raises(ConfigError, match="differentiated only once"), differentiable():
        raise RuntimeError("derivative for aten::_scaled_dot_product is not implemented")
    with pytest.raises(RuntimeError, match="other"), differentiable():
        raise RuntimeError("other")


def test_a_state_is_a_copy():
    x = torch.rand(2, 10, 1)
    episode = Episode(Batch(x, x.sin()), Batch(x, x.sin()))
    trainer = Trainer(MAML(InnerLoop(MLP(), loss=task_loss)))
    trainer.step(episode)
    state = trainer.state_dict()
    before = {n: t.clone() for group in state.values() for n, t in group.items()}
    trainer.step(episode)
    assert all(torch.equal(before[n], t) for group in state.values() for n, t in group.items())
