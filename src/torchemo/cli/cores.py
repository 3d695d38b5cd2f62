"""How a command uses the machine: one thread per task, single-threaded operations."""

import os


def task_workers() -> int:
    """Set torch to one thread per operation and return how many tasks may run at once.

    One thread per task has no synchronisation inside operations and gives the same bits on any number of
    cores; ``OMP_NUM_THREADS`` limits it, as people expect.
    """
    import torch

    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    torch.set_num_threads(1)
    return min(cores, int(limit)) if limit.isdigit() and int(limit) > 0 else cores
