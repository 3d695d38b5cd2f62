"""EMO with TorchOpt: one link of a chain of gradient transformations, second-order MAML on sine waves.

The lines marked [EMO] are all that EMO adds to the loop: the inner optimizer of a task is
``chain(transform(emo, recall), sgd(lr))``, and its state counts the inner steps. Any other optimizer of
TorchOpt can stand in for ``sgd``. A memory of capacity 0 is plain MAML, so one loop trains both.
So few iterations show how it is wired, not which of the two is better.
"""

import argparse

import torch
import torchopt
from torch import nn
from torch.func import functional_call

from torchemo.core.task_axis import join
from torchemo.data.synthetic.regression import RegressionSpec, sample_regression
from torchemo.interop import as_task, for_module
from torchemo.interop.torchopt import transform
from torchemo.memory.keys.statistics import StatisticsKey

SPEC = RegressionSpec("sinusoid", n_shot=10, n_query=10)
INNER_LR, OUTER_LR, STEPS, BATCH = 0.01, 0.002, 3, 4


def mse(net, params, x, y):
    """Squared error of one task."""
    return nn.functional.mse_loss(functional_call(net, params, (x,)), y)


def solve(net, tasks, b, *, emo, recall):
    """Adapt to task b; returns its query loss and what to remember of it."""
    fast, own = dict(net.named_parameters()), []
    optimizer = torchopt.chain(
        transform(emo, recall, task=b), torchopt.sgd(INNER_LR)
    )  # [EMO] combine
    state = optimizer.init(fast)
    for _ in range(STEPS):
        loss = mse(net, fast, tasks.support.x[b], tasks.support.y[b])
        found = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        grads = dict(zip(fast, found, strict=True))
        own.append(as_task(grads))
        updates, state = optimizer.update(grads, state, inplace=False)
        fast = torchopt.apply_updates(fast, updates, inplace=False)
    return mse(net, fast, tasks.query.x[b], tasks.query.y[b]), emo.value(tuple(own))


def train(capacity, *, iterations, seed):
    """Meta-train a network; returns it with its memory."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    emo = for_module(net, k=5, capacity=capacity, encoder=StatisticsKey(1, 1))
    outer = torch.optim.Adam(net.parameters(), lr=OUTER_LR)
    for i in range(iterations):
        tasks = sample_regression(SPEC, seed, split="train", start=i * BATCH, count=BATCH)
        recall = emo.recall(emo.encode(tasks.support))  # [EMO] recall
        outer.zero_grad()
        values = []
        for b in range(BATCH):
            loss, value = solve(net, tasks, b, emo=emo, recall=recall)
            (loss / BATCH).backward()
            values.append(value)
        outer.step()
        emo.remember(recall, join(values))  # [EMO] remember
    return net, emo


def evaluate(net, emo, *, test_tasks, seed):
    """Return the mean query error of test tasks before and after adaptation; nothing is written."""
    emo.eval()
    tasks = sample_regression(SPEC, seed, split="test", start=0, count=test_tasks)
    recall = emo.recall(emo.encode(tasks.support))
    before = nn.functional.mse_loss(net(tasks.query.x), tasks.query.y).item()
    after = 0.0
    for b in range(test_tasks):
        loss, _ = solve(net, tasks, b, emo=emo, recall=recall)
        after += loss.item() / test_tasks
    return before, after


def main():
    """Train without and with memory and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--test-tasks", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, capacity in (("MAML", 0), ("MAML + EMO", 50)):
        net, emo = train(capacity, iterations=args.iterations, seed=args.seed)
        before, after = evaluate(net, emo, test_tasks=args.test_tasks, seed=args.seed)
        print(f"{name:<10}  MSE before {before:.3f}  after {STEPS} steps {after:.3f}")


if __name__ == "__main__":
    main()
