"""How a command uses the machine: one thread per task, single-threaded operations, memory kept."""

import os


def task_workers(*, release_memory: bool = False) -> int:
    """Set torch to one thread per operation and return how many tasks may run at once.

    One thread per task has no synchronisation inside operations and gives the same bits on any number of
    cores; ``OMP_NUM_THREADS`` limits it, as people expect. The C allocator is told to keep freed memory,
    which every step would otherwise pay for anew.
    """
    import torch

    from torchemo.core.allocator import keep_memory, wanted
    from torchemo.core.workers import usable_cores

    if wanted() and not release_memory:
        keep_memory()
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = usable_cores()
    torch.set_num_threads(1)
    return min(cores, int(limit)) if limit.isdigit() and int(limit) > 0 else cores
