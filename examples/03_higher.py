"""EMO with higher: a ``grad_callback`` for ``diffopt.step``, second-order MAML on sine waves.

The lines marked [EMO] are all that EMO adds to the loop. The callback counts the inner steps and keeps
the task's own gradients, which higher shows to nobody else. A memory of capacity 0 is plain MAML, so one
loop trains both.
So few iterations show how it is wired, not which of the two is better.
"""

import argparse

import higher
import torch
from torch import nn

from torchemo.core.task_axis import join
from torchemo.data.synthetic.regression import RegressionSpec, sample_regression
from torchemo.interop import for_module
from torchemo.interop.higher import callback
from torchemo.memory.keys.statistics import StatisticsKey

SPEC = RegressionSpec("sinusoid", n_shot=10, n_query=10)
INNER_LR, OUTER_LR, STEPS, BATCH = 0.01, 0.002, 3, 4
mse = nn.functional.mse_loss


def solve(net, tasks, b, *, emo, recall, second_order):
    """Adapt to task b; returns its query loss and what to remember of it."""
    names = [name for name, _ in net.named_parameters()]
    inner = torch.optim.SGD(net.parameters(), lr=INNER_LR)
    with higher.innerloop_ctx(
        net, inner, copy_initial_weights=False, track_higher_grads=second_order
    ) as (fast, diffopt):
        hook = callback(emo, recall, names, task=b)
        for _ in range(STEPS):
            loss = mse(fast(tasks.support.x[b]), tasks.support.y[b])
            diffopt.step(loss, grad_callback=hook)  # [EMO] combine
        return mse(fast(tasks.query.x[b]), tasks.query.y[b]), emo.value(tuple(hook.gradients))


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
            loss, value = solve(net, tasks, b, emo=emo, recall=recall, second_order=True)
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
    before = mse(net(tasks.query.x), tasks.query.y).item()
    after = 0.0
    for b in range(test_tasks):
        loss, _ = solve(net, tasks, b, emo=emo, recall=recall, second_order=False)
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
