"""The machine's limit: how fast it multiplies matrices, and what share of that a step reaches."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from torchemo.config.registry import Part
from torchemo.lab.bench.clock import Spread, Variant, interleave, seconds_per_call, spread, timed
from torchemo.lab.bench.measures.peers import peer_makers
from torchemo.lab.bench.measures.step import OURS, our_step
from torchemo.lab.bench.measures.work import Work
from torchemo.learners.build import build_learner
from torchemo.models import ResNet12
from torchemo.training.step import outer_step

SIDE = 1024
"""Side of the matrices: large enough to be bound by arithmetic, small enough to be quick."""


def matrix_peak(threads: int, *, repeats: int) -> Spread:
    """Return GFLOP/s of a float32 matrix product."""
    torch.set_num_threads(threads)
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    out = torch.empty(SIDE, SIDE)
    found = seconds_per_call(lambda: torch.mm(a, b, out=out), repeats=repeats, least=0.2)
    torch.set_num_threads(1)
    work = 2 * SIDE**3 / 1e9
    return {
        "median": work / found["median"],
        "min": work / found["max"],
        "max": work / found["min"],
    }


def counted(run: Callable[[], object]) -> float:
    """Count the GFLOP of the convolutions and matrix products in ``run``, as torch operations."""
    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops()) / 1e9


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the peak and the share of it that a second-order step reaches, for each image size.

    The step's work is that of direct convolutions. Winograd's algorithm multiplies less, so a share above
    one is possible and says that the kernels beat the best direct convolution there could be.
    """
    peaks = {str(n): matrix_peak(n, repeats=request["repeats"]) for n in request["workers"]}
    cases = [
        _share(Work(**work), workers, peaks[str(workers)]["median"], request["repeats"])
        for work in request["works"]
        for workers in request["workers"]
    ]
    return {"gflops_peak": peaks, "matrix_side": SIDE, "cases": cases}


def _share(work: Work, workers: int, peak: float, repeats: int) -> dict[str, Any]:
    plain = peer_makers(work)["plain loop"]()
    gflop = counted(plain)
    variants = {
        f"{OURS}fused": Variant(our_step(work, "fused", workers=workers)),
        "plain loop": Variant(plain, workers),
    }
    times = interleave(variants, repeats=repeats)
    return {
        "size": work.size,
        "workers": workers,
        "gflop": gflop,
        "gflops": {n: spread([gflop / s.wall for s in samples]) for n, samples in times.items()},
        "share": {
            n: spread([gflop / s.wall / peak for s in samples]) for n, samples in times.items()
        },
    }


def resnet12(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure where ResNet-12 stands: one task, one second-order step, one thread."""
    work = Work(**request["work"])
    model = ResNet12(work.n_way, image_size=work.size)
    learner = build_learner(Part("maml", work.inner), model, work.shape)
    params, episode = learner.init(torch.Generator().manual_seed(0)), work.episode()

    def step() -> None:
        outer_step(learner, params, episode)

    gflop, peak = counted(step), matrix_peak(1, repeats=request["repeats"])["median"]
    times = [timed(step).wall for _ in range(request["repeats"])]
    share = spread([gflop / wall / peak for wall in times])
    return {"gflop": gflop, "gflops_peak": peak, "wall": spread(times), "share": share}
