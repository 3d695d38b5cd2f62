"""EMO with learn2learn: combined gradients into ``maml_update``, second-order MAML on sine waves.

``clone.adapt(loss)`` is two lines of learn2learn, ``autograd.grad`` and ``maml_update``; EMO goes between
them. The lines marked [EMO] are all that it adds to the loop. A memory of capacity 0 is plain MAML, so one
loop trains both. The released learn2learn does not build on Python 3.11 and newer: install its source.
So few iterations show how it is wired, not which of the two is better.
"""

import argparse
import sys

import torch
from torch import nn

from torchemo.core.task_axis import join
from torchemo.data.synthetic.regression import RegressionSpec, sample_regression
from torchemo.interop import as_task, combine_one, for_module
from torchemo.memory.keys.statistics import StatisticsKey

try:
    from learn2learn.algorithms.maml import MAML, maml_update
except ImportError as missing:
    print(f"learn2learn is not installed, nothing to show ({missing}).")
    sys.exit(0)

SPEC = RegressionSpec("sinusoid", n_shot=10, n_query=10)
INNER_LR, OUTER_LR, STEPS, BATCH = 0.01, 0.002, 3, 4
mse = nn.functional.mse_loss


def solve(maml, tasks, b, *, emo, recall):
    """Adapt a clone to task b; returns its query loss and what to remember of it."""
    # Names without the wrapper's prefix: the memory knows the network's own names.
    names = [name for name, _ in maml.module.named_parameters()]
    clone, own = maml.clone(), []
    for step in range(STEPS):
        loss = mse(clone(tasks.support.x[b]), tasks.support.y[b])
        grads = torch.autograd.grad(loss, list(clone.module.parameters()), create_graph=True)
        own.append(as_task(grads, names=names))
        grads = combine_one(emo, grads, recall, step=step, task=b, names=names)  # [EMO] combine
        maml_update(clone.module, INNER_LR, grads)
    return mse(clone(tasks.query.x[b]), tasks.query.y[b]), emo.value(tuple(own))


def train(capacity, *, iterations, seed):
    """Meta-train a network; returns it with its memory."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    maml = MAML(net, lr=INNER_LR)
    emo = for_module(net, k=5, capacity=capacity, encoder=StatisticsKey(1, 1))
    outer = torch.optim.Adam(maml.parameters(), lr=OUTER_LR)
    for i in range(iterations):
        tasks = sample_regression(SPEC, seed, split="train", start=i * BATCH, count=BATCH)
        recall = emo.recall(emo.encode(tasks.support))  # [EMO] recall
        outer.zero_grad()
        values = []
        for b in range(BATCH):
            loss, value = solve(maml, tasks, b, emo=emo, recall=recall)
            (loss / BATCH).backward()
            values.append(value)
        outer.step()
        emo.remember(recall, join(values))  # [EMO] remember
    return maml, emo


def evaluate(maml, emo, *, test_tasks, seed):
    """Return the mean query error of test tasks before and after adaptation; nothing is written."""
    emo.eval()
    tasks = sample_regression(SPEC, seed, split="test", start=0, count=test_tasks)
    recall = emo.recall(emo.encode(tasks.support))
    before = mse(maml(tasks.query.x), tasks.query.y).item()
    after = 0.0
    for b in range(test_tasks):
        loss, _ = solve(maml, tasks, b, emo=emo, recall=recall)
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
        maml, emo = train(capacity, iterations=args.iterations, seed=args.seed)
        before, after = evaluate(maml, emo, test_tasks=args.test_tasks, seed=args.seed)
        print(f"{name:<10}  MSE before {before:.3f}  after {STEPS} steps {after:.3f}")


if __name__ == "__main__":
    main()
