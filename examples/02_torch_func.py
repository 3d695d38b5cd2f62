"""EMO with ``torch.func``: all tasks of a batch at once, second-order MAML on sine waves.

``vmap(grad(loss))`` already gives gradients with a leading task axis, which is EMO's own convention,
so `EMO.combine` takes them as they are. The lines marked [EMO] are all that EMO adds to the loop.
A memory of capacity 0 is plain MAML, so one loop trains both.
So few iterations show how it is wired, not which of the two is better.
"""

import argparse

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from torchemo.data.synthetic.regression import RegressionSpec, sample_regression
from torchemo.interop import for_module
from torchemo.memory.keys.statistics import StatisticsKey

SPEC = RegressionSpec("sinusoid", n_shot=10, n_query=10)
INNER_LR, OUTER_LR, STEPS, BATCH = 0.01, 0.002, 3, 4
NET = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def loss(params, x, y):
    """Squared error of one task."""
    return nn.functional.mse_loss(functional_call(NET, params, (x,)), y)


def adapt(theta, support, *, emo, recall):
    """Take a few SGD steps on all support sets at once; also returns the gradients on the way."""
    tasks = support.x.shape[0]
    fast, own = {name: p.expand(tasks, *p.shape) for name, p in theta.items()}, []
    for step in range(STEPS):
        grads = vmap(grad(loss))(fast, support.x, support.y)
        own.append(grads)
        direction = emo.combine(grads, recall, step=step)  # [EMO] combine
        fast = {name: p - INNER_LR * direction[name] for name, p in fast.items()}
    return fast, tuple(own)


def train(capacity, *, iterations, seed):
    """Meta-train an initialisation; returns it with its memory."""
    torch.manual_seed(seed)
    for layer in NET:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    theta = {name: p.detach().clone().requires_grad_() for name, p in NET.named_parameters()}
    emo = for_module(NET, k=5, capacity=capacity, encoder=StatisticsKey(1, 1))
    outer = torch.optim.Adam(theta.values(), lr=OUTER_LR)
    for i in range(iterations):
        tasks = sample_regression(SPEC, seed, split="train", start=i * BATCH, count=BATCH)
        recall = emo.recall(emo.encode(tasks.support))  # [EMO] recall
        fast, own = adapt(theta, tasks.support, emo=emo, recall=recall)
        outer.zero_grad()
        vmap(loss)(fast, tasks.query.x, tasks.query.y).mean().backward()
        outer.step()
        emo.remember(recall, emo.value(own))  # [EMO] remember
    return theta, emo


@torch.no_grad()
def evaluate(theta, emo, *, test_tasks, seed):
    """Return the mean query error of test tasks before and after adaptation; nothing is written."""
    emo.eval()
    tasks = sample_regression(SPEC, seed, split="test", start=0, count=test_tasks)
    recall = emo.recall(emo.encode(tasks.support))
    before = loss(theta, tasks.query.x, tasks.query.y)
    fast, _ = adapt(theta, tasks.support, emo=emo, recall=recall)
    after = vmap(loss)(fast, tasks.query.x, tasks.query.y).mean()
    return before.item(), after.item()


def main():
    """Train without and with memory and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--test-tasks", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, capacity in (("MAML", 0), ("MAML + EMO", 50)):
        theta, emo = train(capacity, iterations=args.iterations, seed=args.seed)
        before, after = evaluate(theta, emo, test_tasks=args.test_tasks, seed=args.seed)
        print(f"{name:<10}  MSE before {before:.3f}  after {STEPS} steps {after:.3f}")


if __name__ == "__main__":
    main()
