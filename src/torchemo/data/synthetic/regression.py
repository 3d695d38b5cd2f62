"""Regression families: heterogeneous few-shot tasks without labels to permute, drawn in microseconds.

Three published groups and the parts of one; inputs uniform on [-5, 5], parameters uniform in their
ranges, family uniform:

- ``sinusoid``: the sine task of MAML, 1-D.
- ``hsml4``: sine, line, quadratic, cubic, 1-D, without noise (HSML's toy group).
- ``arml6``: sine, line, quadratic, cubic, quadratic surface, ripple on 2-D inputs, with noise N(0, 0.3^2)
  on support and query targets; the 1-D families have x2 = 1 (ARML).
- ``sine``, ``line``, ``quadratic``, ``cubic``: one family of ``hsml4`` alone, to train on one domain.

Episode i of a split under a seed is a pure function of (seed, split, i).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode

Group: TypeAlias = Literal["sinusoid", "hsml4", "arml6", "sine", "line", "quadratic", "cubic"]
Formula: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``(x [B, n, d], coefficients [B, 4, 1]) -> y [B, n]``."""

X_RANGE = (-5.0, 5.0)
MAX_COEFFICIENTS = 4


class Family(NamedTuple):
    """A parametric family of functions: its name, its formula, and the range of each coefficient."""

    name: str
    formula: Formula
    ranges: tuple[tuple[float, float], ...]
    planar: bool = False


def _shifted_sine(x: Tensor, c: Tensor) -> Tensor:
    """Return a sin(x - p)."""
    return c[:, 0] * torch.sin(x[..., 0] - c[:, 1])


def _raised_sine(x: Tensor, c: Tensor) -> Tensor:
    """Return a sin(f x) + p: p is an offset in HSML's published code."""
    return c[:, 0] * torch.sin(c[:, 1] * x[..., 0]) + c[:, 2]


def _sine(x: Tensor, c: Tensor) -> Tensor:
    """Return a sin(f x1 + p)."""
    return c[:, 0] * torch.sin(c[:, 1] * x[..., 0] + c[:, 2])


def _line(x: Tensor, c: Tensor) -> Tensor:
    """Return A x + b."""
    return c[:, 0] * x[..., 0] + c[:, 1]


def _quadratic(x: Tensor, c: Tensor) -> Tensor:
    """Return A x^2 + b x + c."""
    return c[:, 0] * x[..., 0].square() + c[:, 1] * x[..., 0] + c[:, 2]


def _cubic(x: Tensor, c: Tensor) -> Tensor:
    """Return A x^3 + b x^2 + c x + d."""
    x1 = x[..., 0]
    return c[:, 0] * x1.square() * x1 + c[:, 1] * x1.square() + c[:, 2] * x1 + c[:, 3]


def _surface(x: Tensor, c: Tensor) -> Tensor:
    """Return A x1^2 + B x2^2."""
    return c[:, 0] * x[..., 0].square() + c[:, 1] * x[..., 1].square()


def _ripple(x: Tensor, c: Tensor) -> Tensor:
    """Return sin(-A (x1^2 + x2^2)) + B."""
    return torch.sin(-c[:, 0] * x.square().sum(-1)) + c[:, 1]


_AMPLITUDE, _FREQUENCY = (0.1, 5.0), (0.8, 1.2)
_SINE_RANGES = (_AMPLITUDE, _FREQUENCY, (0.0, 2 * math.pi))
_POLYNOMIALS = (
    Family("line", _line, ((-3.0, 3.0), (-3.0, 3.0))),
    Family("quadratic", _quadratic, ((-0.2, 0.2), (-2.0, 2.0), (-3.0, 3.0))),
    Family("cubic", _cubic, ((-0.1, 0.1), (-0.2, 0.2), (-2.0, 2.0), (-3.0, 3.0))),
)

_HSML = (Family("sine", _raised_sine, _SINE_RANGES), *_POLYNOMIALS)

FAMILIES: MappingProxyType[str, tuple[Family, ...]] = MappingProxyType(
    {
        "sinusoid": (Family("sine", _shifted_sine, (_AMPLITUDE, (0.0, math.pi))),),
        "hsml4": _HSML,
        "arml6": (
            Family("sine", _sine, _SINE_RANGES),
            *_POLYNOMIALS,
            Family("quadratic_surface", _surface, ((-1.0, 1.0), (-1.0, 1.0)), planar=True),
            Family("ripple", _ripple, ((-0.2, 0.2), (-3.0, 3.0)), planar=True),
        ),
        **{family.name: (family,) for family in _HSML},
    }
)
"""Families of each group; a family's place in its group is its id in `Episode.domain`."""

_NOISE = MappingProxyType({"arml6": 0.3})


@final
@dataclass(frozen=True)
class RegressionSpec:
    """What a regression episode looks like.

    Attributes:
        group: Which families tasks are drawn from.
        n_shot: Support points per task.
        n_query: Query points per task.
        noise: Standard deviation of the noise on all targets; None for the group's published value.
    """

    group: Group
    n_shot: int = 10
    n_query: int = 10
    noise: float | None = None

    def __post_init__(self) -> None:
        if self.group not in FAMILIES:
            raise ConfigError(f"group should be one of {list(FAMILIES)}, got '{self.group}'.")
        if self.n_shot < 1 or self.n_query < 1:
            raise ConfigError(
                f"n_shot and n_query should be at least 1, got {self.n_shot} and {self.n_query}."
            )
        if not 0 <= self.noise_std < math.inf:
            raise ConfigError(f"noise should be a finite number of at least 0, got {self.noise}.")

    @property
    def families(self) -> tuple[str, ...]:
        """Names of the families; their order gives the ids in `Episode.domain`."""
        return tuple(family.name for family in FAMILIES[self.group])

    @property
    def input_dim(self) -> int:
        """Dimension d of an input."""
        return 2 if self.group == "arml6" else 1

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in use."""
        return _NOISE.get(self.group, 0.0) if self.noise is None else self.noise


class RegressionTasks(NamedTuple):
    """The functions behind B tasks.

    Attributes:
        family: Family id of each task.
        coefficients: Coefficients in the order of the family's formula, float64; unused ones are 0.
    """

    family: Int[Tensor, " task"]
    coefficients: Float[Tensor, "task 4"]


class _Draws(NamedTuple):
    tasks: RegressionTasks
    x: Tensor
    noise: Tensor


def sample_regression(
    spec: RegressionSpec,
    seed: int,
    *,
    split: str,
    start: int,
    count: int,
    dtype: torch.dtype = torch.float32,
) -> Episode:
    """Draw episodes ``start .. start + count - 1`` of ``split``.

    An episode does not depend on ``start``, ``count`` or ``dtype`` (drawn in float64, rounded last), and
    its family, coefficients and query inputs do not depend on ``n_shot`` or ``noise``.

    Returns:
        Inputs ``[B, n, d]``, targets ``[B, n, 1]``; ``domain`` is the family id, ``index`` is i.

    Example:
        >>> spec = RegressionSpec("hsml4", n_shot=5)
        >>> episode = sample_regression(spec, 0, split="train", start=0, count=3)
        >>> episode.support.x.shape, episode.query.y.shape
        (torch.Size([3, 5, 1]), torch.Size([3, 10, 1]))
    """
    draws = _draw(spec, _generators(spec, seed, split=split, start=start, count=count))
    index = torch.arange(start, start + count)
    return replace(_episode(spec, draws, dtype=dtype), index=index)


def sample_visits(
    spec: RegressionSpec, functions: Sequence[torch.Generator], points: Sequence[torch.Generator]
) -> Episode:
    """Draw tasks whose functions and query points come from one generator, support points from another.

    Args:
        spec: Group, shots, queries, noise.
        functions: One generator per task; the same one gives the same function and queries.
        points: One generator per task, for the support points.
    """
    first, again, n = _draw(spec, functions), _draw(spec, points), spec.n_query
    x = torch.cat([first.x[:, :n], _placed(spec, first.tasks, again.x[:, n:])], 1)
    noise = torch.cat([first.noise[:, :n], again.noise[:, n:]], 1)
    return _episode(spec, _Draws(first.tasks, x, noise))


def _episode(spec: RegressionSpec, draws: _Draws, *, dtype: torch.dtype = torch.float32) -> Episode:
    y = regression_targets(spec, draws.tasks, x=draws.x) + spec.noise_std * draws.noise
    x, y, n = draws.x.to(dtype), y.to(dtype), spec.n_query
    return Episode(
        support=Batch(x[:, n:].contiguous(), y[:, n:].contiguous()),
        query=Batch(x[:, :n].contiguous(), y[:, :n].contiguous()),
        domain=draws.tasks.family,
    )


def regression_tasks(
    spec: RegressionSpec, seed: int, *, split: str, start: int, count: int
) -> RegressionTasks:
    """Return the functions behind the episodes that `sample_regression` draws."""
    return _draw(spec, _generators(spec, seed, split=split, start=start, count=count)).tasks


def regression_targets(
    spec: RegressionSpec, tasks: RegressionTasks, *, x: Float[Tensor, "task n d"]
) -> Float[Tensor, "task n 1"]:
    """Evaluate each task's function, without noise, at its own inputs."""
    coefficients = tasks.coefficients.to(x.dtype).unsqueeze(-1)
    y = torch.empty(x.shape[:2], dtype=x.dtype)
    for family, definition in enumerate(FAMILIES[spec.group]):
        rows = tasks.family == family
        y[rows] = definition.formula(x[rows], coefficients[rows])
    return y.unsqueeze(-1)


def _generators(
    spec: RegressionSpec, seed: int, *, split: str, start: int, count: int
) -> list[torch.Generator]:
    if split not in ("train", "val", "test"):
        raise ConfigError(f"split should be train, val or test, got '{split}'.")
    if start < 0 or count < 1:
        raise ConfigError(f"expected start >= 0 and count >= 1, got {start} and {count}.")
    path = ("regression", spec.group, split)
    return [generator_for(seed, *path, index) for index in range(start, start + count)]


def _draw(spec: RegressionSpec, generators: Sequence[torch.Generator]) -> _Draws:
    points = spec.n_query + spec.n_shot
    uniforms, noises = [], []
    for generator in generators:
        size = 1 + MAX_COEFFICIENTS + points * spec.input_dim
        uniforms.append(torch.rand(size, generator=generator, dtype=torch.float64))
        if spec.noise_std > 0:
            noises.append(torch.randn(points, generator=generator, dtype=torch.float64))
    u, count = torch.stack(uniforms), len(uniforms)
    noise = torch.stack(noises) if noises else torch.zeros(count, points, dtype=torch.float64)
    tasks = _tasks(spec, u[:, : 1 + MAX_COEFFICIENTS])
    x = _between(u[:, 1 + MAX_COEFFICIENTS :], X_RANGE[0], X_RANGE[1])
    x = _placed(spec, tasks, x.reshape(count, points, spec.input_dim))
    return _Draws(tasks, x, noise.unsqueeze(-1))


def _placed(spec: RegressionSpec, tasks: RegressionTasks, x: Tensor) -> Tensor:
    """Put the inputs of 1-D families on the line x2 = 1."""
    if spec.input_dim == 1:
        return x
    planar = torch.tensor([family.planar for family in FAMILIES[spec.group]])[tasks.family]
    line = torch.ones_like(x[..., 1])
    return torch.stack([x[..., 0], torch.where(planar[:, None], x[..., 1], line)], -1)


def _tasks(spec: RegressionSpec, u: Float[Tensor, "task 5"]) -> RegressionTasks:
    families = FAMILIES[spec.group]
    family = (u[:, 0] * len(families)).long()
    padding = ((0.0, 0.0),) * MAX_COEFFICIENTS
    ranges = torch.tensor(
        [(f.ranges + padding)[:MAX_COEFFICIENTS] for f in families], dtype=torch.float64
    )[family]
    return RegressionTasks(family, _between(u[:, 1:], ranges[..., 0], ranges[..., 1]))


def _between(u: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return low + u * (high - low)
