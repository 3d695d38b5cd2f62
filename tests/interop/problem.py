"""One small meta-learning problem in float64, and its meta-gradient written out by hand.

MLP 2-8-1 with tanh, two tasks, three inner SGD steps, a memory of six slots of which three are recalled.
"""

import torch
from torch import Tensor, nn

from torchemo.core.losses import mean_squared_error
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode, Params
from torchemo.interop import for_module
from torchemo.learners.gradient.inner import SGD
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.memory.aggregators import Gated
from torchemo.memory.emo import EMO
from torchemo.memory.keys.embedders import PairEmbedder
from torchemo.memory.keys.transformer import MeanKey
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory
from torchemo.models import lift
from torchemo.training.step import OuterStep, outer_step

TASKS, STEPS, LR, SLOTS, K, KEY_DIM = 2, 3, 0.1, 6, 3, 4
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def normal(*shape: int, path: str) -> Tensor:
    return torch.randn(shape, generator=generator_for(0, path), dtype=torch.float64)


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    for name, p in net.named_parameters():
        p.data = 0.5 * normal(*p.shape, path=name)
    return net


def episode() -> Episode:
    def draw(n: int, path: str) -> Batch:
        return Batch(normal(TASKS, n, 2, path=path + "x"), normal(TASKS, n, 1, path=path + "y"))

    return Episode(draw(5, "support"), draw(7, "query"))


def mse(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def encoder() -> MeanKey:
    pairs = PairEmbedder(2, 1, generator=generator_for(0, "keys"), dim=KEY_DIM)
    return MeanKey(pairs).double()


def stored() -> tuple[Tensor, Params]:
    """What the memory is filled with: keys [6, 4] and values {name: [6, *shape]}."""
    keys = nn.functional.normalize(normal(SLOTS, KEY_DIM, path="slot keys"), dim=1)
    shapes = {name: p.shape for name, p in network().named_parameters()}
    return keys, {n: 0.3 * normal(SLOTS, *s, path="value " + n) for n, s in shapes.items()}


def fill(emo: EMO) -> EMO:
    emo.store.write(*stored())
    return emo


def sum_emo(memory_steps: str | float = "all") -> EMO:
    """Sum at every step with uniform weights: the paper's variant."""
    how = {"encoder": encoder(), "memory_steps": memory_steps}
    return fill(for_module(network(), k=K, capacity=SLOTS, **how))


def learned_emo() -> EMO:
    """Everything that the outer loss can train: softmax weights, gates per step, own factors, keys."""
    gated = Gated(NAMES, steps=STEPS, learn_own=True).double()
    gated.gate.data = normal(len(NAMES), STEPS, path="gates")
    double = {"value_dtype": torch.float64, "key_dtype": torch.float64}
    store = EpisodicMemory(SLOTS, KEY_DIM, **double)
    retrieval = Retrieval(K, weights="softmax", temperature=0.5).double()
    return fill(EMO(store, retrieval, gated, encoder=encoder(), memory_steps="all"))


EMOS = {
    "none": lambda: None,
    "sum": sum_emo,
    "first": lambda: sum_emo("first"),
    "learned": learned_emo,
}


def library_step(emo: EMO | None) -> OuterStep:
    net = network()
    model = lift(net, head="2")
    loop = InnerLoop(model, loss=mean_squared_error, rule=SGD(LR), steps=STEPS)
    params = model.init(generator_for(0))
    return outer_step(MAML(loop), params, episode(), memory=emo)


def nearest_by_hand(key: Tensor) -> list[int]:
    """The K slots with the smallest distance to a key, by sorting a list."""
    keys, _ = stored()
    distance = [
        sum((a - float(b)) ** 2 for a, b in zip(key.tolist(), s, strict=True)) for s in keys
    ]
    return sorted(range(SLOTS), key=lambda slot: distance[slot])[:K]


def meta_gradient_by_hand(*, remembered_steps: int) -> Params:
    """MAML's meta-gradient with ``g + mean(V)`` in the first steps, without any part of torchemo's loop."""
    theta = {n: p.detach().clone().requires_grad_() for n, p in network().named_parameters()}
    tasks, (_, values) = episode(), stored()
    keys = encoder()(tasks.support).detach()
    total = torch.zeros((), dtype=torch.float64)
    for b in range(TASKS):
        slots = nearest_by_hand(keys[b])
        fast = dict(theta)
        for step in range(STEPS):
            loss = mse(_forward(fast, tasks.support.x[b]), tasks.support.y[b])
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            for (name, p), grad in zip(list(fast.items()), grads, strict=True):
                recalled = sum(values[name][slot] for slot in slots) / K
                fast[name] = p - LR * (grad + recalled if step < remembered_steps else grad)
        total = total + mse(_forward(fast, tasks.query.x[b]), tasks.query.y[b]) / TASKS
    return dict(zip(theta, torch.autograd.grad(total, list(theta.values())), strict=True))


def _forward(theta: Params, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ theta["0.weight"].T + theta["0.bias"])
    return hidden @ theta["2.weight"].T + theta["2.bias"]


TRAINED = {
    "aggregator.gate",
    "aggregator.own",
    "encoder.embedder.linear.bias",
    "encoder.embedder.linear.weight",
    "retrieval.log_temperature",
}
BY_HAND = {"none": 0, "sum": STEPS, "first": 1}


def assert_same_meta_gradient(emo_case: str, losses, gradients: Params, emo_gradients: Params):
    """Compare with the library's outer step, and where it is written by hand with that, to 1e-12."""
    expected = library_step(EMOS[emo_case]())
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(losses, expected.losses, **close)
    torch.testing.assert_close(gradients, expected.gradients, **close)
    torch.testing.assert_close(emo_gradients, expected.memory_gradients, **close)
    assert set(emo_gradients) == (TRAINED if emo_case == "learned" else set())
    if emo_case in BY_HAND:
        by_hand = meta_gradient_by_hand(remembered_steps=BY_HAND[emo_case])
        torch.testing.assert_close(gradients, by_hand, **close)


def collect(losses: list[Tensor], net_params: Params, emo: EMO | None):
    """Differentiate the mean loss in the network's and EMO's parameters, as a host would."""
    stacked = torch.stack(losses)
    trained = {} if emo is None else dict(emo.named_parameters())
    wanted = {**net_params, **{f"emo {n}": p for n, p in trained.items()}}
    found = torch.autograd.grad(stacked.mean(), list(wanted.values()), allow_unused=True)
    grads = dict(zip(wanted, found, strict=True))
    own = {n: grads[n] for n in net_params}
    learned = {n: grads[f"emo {n}"] for n in trained if grads[f"emo {n}"] is not None}
    return stacked.detach(), own, learned
