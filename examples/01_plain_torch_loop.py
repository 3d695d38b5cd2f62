"""EMO with plain torch: a deep copy per task, ``loss.backward()`` and ``optimizer.step()``.

First-order MAML on sine waves. The loop is the user's own; EMO adds the lines marked [EMO]:
recall before a batch of tasks, `apply_` between backward and step, remember after the outer step.
A memory of capacity 0 is plain first-order MAML, so one loop trains both.
So few iterations show how it is wired, not which of the two is better.
"""

import argparse
import copy

import torch
from torch import nn

from torchemo.core.task_axis import join
from torchemo.data.synthetic.regression import RegressionSpec, sample_regression
from torchemo.interop import apply_, for_module, gradients
from torchemo.memory.keys.statistics import StatisticsKey

SPEC = RegressionSpec("sinusoid", n_shot=10, n_query=10)
INNER_LR, OUTER_LR, STEPS, BATCH = 0.01, 0.002, 3, 4
mse = nn.functional.mse_loss


def adapt(net, x, y, *, emo, recall, task):
    """Take a few SGD steps on one support set, on a copy of the network."""
    fast, own = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(fast.parameters(), lr=INNER_LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        mse(fast(x), y).backward()
        own.append(gradients(fast))
        apply_(emo, fast, recall, step=step, task=task)  # [EMO] combine
        optimizer.step()
    return fast, emo.value(tuple(own))


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
            x, y = tasks.support.x[b], tasks.support.y[b]
            fast, value = adapt(net, x, y, emo=emo, recall=recall, task=b)
            fast.zero_grad()
            (mse(fast(tasks.query.x[b]), tasks.query.y[b]) / BATCH).backward()
            for p, q in zip(net.parameters(), fast.parameters(), strict=True):
                p.grad = q.grad if p.grad is None else p.grad + q.grad
            values.append(value)
        outer.step()
        emo.remember(recall, join(values))  # [EMO] remember
    return net, emo


def evaluate(net, emo, *, test_tasks, seed):
    """Return the mean query error of test tasks before and after adaptation; nothing is written."""
    emo.eval()
    tasks = sample_regression(SPEC, seed, split="test", start=0, count=test_tasks)
    recall = emo.recall(emo.encode(tasks.support))
    before = mse(net(tasks.query.x), tasks.query.y).item()
    after = 0.0
    for b in range(test_tasks):
        x, y = tasks.support.x[b], tasks.support.y[b]
        fast, _ = adapt(net, x, y, emo=emo, recall=recall, task=b)
        after += mse(fast(tasks.query.x[b]), tasks.query.y[b]).item() / test_tasks
    return before, after


def main():
    """Train without and with memory and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--test-tasks", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, capacity in (("first-order MAML", 0), ("first-order MAML + EMO", 50)):
        net, emo = train(capacity, iterations=args.iterations, seed=args.seed)
        before, after = evaluate(net, emo, test_tasks=args.test_tasks, seed=args.seed)
        print(f"{name:<22}  MSE before {before:.3f}  after {STEPS} steps {after:.3f}")


if __name__ == "__main__":
    main()
