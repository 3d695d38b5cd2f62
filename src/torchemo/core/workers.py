"""Task workers: tasks in parallel threads, results in task order.

Tasks are independent and torch releases the interpreter lock inside its operations, so one thread per
task with single-threaded operations uses the cores without any synchronisation between them, and the
result does not depend on the number of workers. Commands set ``torch.set_num_threads(1)`` for that; the
library itself changes no global setting.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(work: Callable[[T], R], tasks: Sequence[T], *, workers: int = 1) -> list[R]:
    """Apply ``work`` to every task and return the results in task order.

    Args:
        work: What to do with a task; must not depend on the other tasks.
        tasks: The tasks.
        workers: Threads; 1 works in the calling thread.
    """
    if workers <= 1 or len(tasks) <= 1:
        return [work(task) for task in tasks]
    # Whether gradients are recorded is a setting of each thread: hand the caller's over.
    recording = torch.is_grad_enabled()

    def in_thread(task: T) -> R:
        with torch.set_grad_enabled(recording):
            return work(task)

    with ThreadPoolExecutor(min(workers, len(tasks)), thread_name_prefix="task") as pool:
        return list(pool.map(in_thread, tasks))
