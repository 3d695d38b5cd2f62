"""Any ``nn.Module`` as a network with a task axis."""

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedParameter

from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.tree import with_rows
from torchemo.core.types import Params
from torchemo.models.alone import Answering, BesideSupport
from torchemo.models.inputs import check_params

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def lift(module: nn.Module, head: str = "fc") -> "Lifted":
    """Turn a module into a network with a task axis, one ``functional_call`` for each task.

    The module itself is copied and never changed. Its present parameters are what ``init`` returns.

    Args:
        module: Maps ``[n, ...]`` to ``[n, n_out]``; must not update statistics or draw random numbers in
            its forward pass.
        head: Name of the last layer, an ``nn.Linear`` whose output is the module's output.

    Raises:
        ConfigError: If there is no such head, or if a layer keeps statistics or drops at random.

    Example:
        >>> from torchemo.core.rng import generator_for
        >>> from torchemo.core.tree import expand
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))
        >>> model = lift(net, head="2")
        >>> model(expand(model.init(generator_for(0)), 2), torch.rand(2, 10, 3)).shape
        torch.Size([2, 10, 5])
    """
    _check_head(module, head)
    _check_pure(module)
    return Lifted(copy.deepcopy(module), head)


@final
@dataclass(frozen=True, eq=False)
class Lifted:
    """A module as a function with a task axis; made by `lift`.

    Attributes:
        module: The network; only copied, never called.
        head_name: Name of its last linear layer.
    """

    module: nn.Module
    head_name: str
    # functional_call swaps a module's parameters for the time of a call: no two threads may share one.
    _local: threading.local = field(default_factory=threading.local, init=False, repr=False)

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the head's tensors."""
        layer = self.module.get_submodule(self.head_name)
        return tuple(f"{self.head_name}.{name}" for name, _ in layer.named_parameters())

    @property
    def norm(self) -> tuple[str, ...]:
        """Names of the parameters of normalisation layers."""
        layers = [n for n, m in self.module.named_modules() if isinstance(m, NORMS)]
        return tuple(n for n, _ in self.module.named_parameters() if n.rpartition(".")[0] in layers)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Empty: the module's own buffers are constants here."""
        return ()

    def init(self, generator: torch.Generator) -> Params:
        """Return copies of the module's own parameters; nothing is drawn."""
        return {n: p.detach().clone() for n, p in self.module.named_parameters()}

    def __call__(self, params: Params, x: Tensor) -> Float[Tensor, "task n out"]:
        """Map ``x [B, n, ...]`` to outputs ``[B, n, n_out]``."""
        return torch.stack([out for _, out in self._run(params, x)])

    def features(self, params: Params, x: Tensor) -> Float[Tensor, "task n feature"]:
        """Map ``x [B, n, ...]`` to what the head sees, ``[B, n, f]``."""
        return torch.stack([seen for seen, _ in self._run(params, x, skip=self.head)])

    def classify(self, params: Params, features: Tensor) -> Float[Tensor, "task n out"]:
        """Apply the head to ``features [B, n, f]``."""
        own = dict(self.module.named_parameters())
        shapes = {name: tuple(own[name].shape) for name in self.head}
        check_params(params, shapes, tasks=features.shape[0], what="lifted head")
        layer = self._worker(params[self.head[0]]).head
        names = {name: name.rpartition(".")[2] for name in self.head}
        return torch.stack(
            [
                functional_call(layer, {names[n]: params[n][b] for n in names}, (features[b],))
                for b in range(features.shape[0])
            ]
        )

    def at(self, step: int, *, stored: bool = False, sink: Params | None = None) -> "Lifted":
        """Return this network: it is the same at every inner step."""
        return self

    def with_outputs(self, n_out: int) -> "Lifted":
        """Return this network with ``n_out`` outputs; rows of its head begin at their mean."""
        module = copy.deepcopy(self.module)
        layer: Any = module.get_submodule(self.head_name)
        for name, tensor in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(with_rows(tensor.detach(), n_out)))
        layer.out_features = n_out
        return Lifted(module, self.head_name)

    @property
    def reads_support(self) -> bool:
        """In training, queries go through the module together."""
        return False

    def alone(self, params: Params, support_x: Tensor, *, step: int, frozen: bool) -> Answering:
        """Show every query beside the support set where the module normalises by batches, else by itself."""
        layers = [layer for layer in self.module.modules() if isinstance(layer, _BatchNorm)]
        mixes = any(layer.training or layer.running_mean is None for layer in layers)
        return (BesideSupport(self, support_x) if mixes else self), params

    def _run(
        self, params: Params, x: Tensor, *, skip: tuple[str, ...] = ()
    ) -> list[tuple[Tensor, Tensor]]:
        """Call the module for each task; returns what its head saw and said."""
        if x.ndim < 3 or 0 in x.shape:
            raise ShapeError(
                f"lifted network: inputs should be [task, example, ...], got {list(x.shape)}.",
                hint="Inputs start with a task axis: write x[None] for the examples of one task.",
            )
        own = {n: tuple(p.shape) for n, p in self.module.named_parameters() if n not in skip}
        check_params(params, own, tasks=x.shape[0], what="lifted network")
        worker = self._worker(next((params[name] for name in own), x))
        return [worker.run({n: params[n][b] for n in own}, x[b]) for b in range(x.shape[0])]

    def _worker(self, like: Tensor) -> "_Worker":
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = _Worker(copy.deepcopy(self.module), self.head_name)
        worker.match(like)
        return worker


@final
class _PlainAttention:
    """Attention from plain products while any thread is inside: fused kernels have no second derivative.

    Which kernels torch may take is a setting of the process. The first thread to come in changes it, and the
    last one to go puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._setting: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._setting = sdpa_kernel(SDPBackend.MATH)
                self._setting.__enter__()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._setting.__exit__(None, None, None)


_PLAIN_ATTENTION = _PlainAttention()


@final
class _Worker:
    """One thread's copy of the module."""

    def __init__(self, module: nn.Module, head_name: str) -> None:
        self.module = module
        self.head = module.get_submodule(head_name)
        self.kind: tuple[torch.device, torch.dtype] | None = None

    def match(self, like: Tensor) -> None:
        """Bring the module's buffers to the device and precision of the parameters."""
        if self.kind != (like.device, like.dtype):
            self.module.to(device=like.device, dtype=like.dtype)
            self.kind = (like.device, like.dtype)

    def run(self, params: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Call the module on one task; returns what its head saw and said."""
        heard: list[tuple[Tensor, Tensor]] = []
        # A forward pass that writes to a buffer writes to this call's copy: nothing reaches the next task.
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        # The hook lives as long as the call: a lasting one would keep the last graph alive.
        hook = self.head.register_forward_hook(lambda _, args, out: heard.append((args[0], out)))
        with hook, _PLAIN_ATTENTION:
            out = functional_call(self.module, {**buffers, **params}, (x,))
        if len(heard) != 1 or heard[0][1] is not out or heard[0][0].ndim != 2:
            raise ConfigError(
                "lifted network: the head should be called once, on features [example, f], and its"
                f" output should be the network's output; it was called {len(heard)} time(s).",
                hint="Name the last linear layer as head, and leave softmax or reshaping to the loss.",
            )
        return heard[0]


def _check_head(module: nn.Module, head: str) -> None:
    layers = dict(module.named_modules())
    candidates = [name for name, layer in layers.items() if name and isinstance(layer, nn.Linear)]
    if head not in candidates:
        got = f"a {type(layers[head]).__name__}" if head in layers else "no such layer"
        raise ConfigError(
            f"head '{head}' should name an nn.Linear inside {type(module).__name__}, got {got}.",
            hint=f"Linear layers: {', '.join(candidates) or 'none; end the network with one'}.",
        )
    if not {f"{head}.{n}" for n, _ in layers[head].named_parameters()} <= {
        n for n, _ in module.named_parameters()
    }:
        raise ConfigError(
            f"head '{head}' shares a tensor with another layer.",
            hint="Give the head a weight of its own.",
        )


def _check_pure(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        kind = f"layer '{name}' ({type(layer).__name__})"
        if any(isinstance(p, UninitializedParameter) for p in layer.parameters(recurse=False)):
            raise ConfigError(
                f"{kind} has no shape yet.", hint="Call the network once on an example first."
            )
        if isinstance(layer, _NormBase) and layer.training and layer.track_running_stats:
            raise ConfigError(
                f"{kind} updates running statistics in place, which would leak between tasks.",
                hint="Build it with track_running_stats=False (batch statistics),"
                " or call module.eval() first (stored statistics).",
            )
        if isinstance(layer, _DropoutNd) and layer.training and layer.p > 0:
            raise ConfigError(
                f"{kind} draws from torch's global random state, which no run can repeat.",
                hint="Call module.eval() first, or set its p to 0.",
            )
