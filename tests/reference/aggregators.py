"""Aggregators written out: one task, one slot, one coordinate at a time, and a random input for them."""

import math

import torch
from torch import nn

from torchemo.core.rng import generator_for
from torchemo.core.types import Recall

SHAPES = {
    "conv.weight": torch.Size((3, 2, 2)),
    "conv.bias": torch.Size((3,)),
    "scale": torch.Size(()),
    "head.weight": torch.Size((2, 4)),
    "head.bias": torch.Size((2,)),
}
HEAD = ("head.weight", "head.bias")


def random_case(tasks, m, *, seed=0, uniform=False, spread=1.0, shapes=SHAPES):
    """Draw gradients and a recall in float64, nearest slot first, magnitudes over some decades."""
    generator = generator_for(seed, "case")

    def draw(*shape):
        sizes = torch.exp(spread * torch.randn(shape, generator=generator, dtype=torch.float64))
        return sizes * torch.randn(shape, generator=generator, dtype=torch.float64)

    grads = {name: draw(tasks, *shape) for name, shape in shapes.items()}
    values = {name: draw(tasks, m, *shape) for name, shape in shapes.items()}
    distances = draw(tasks, m).abs().sort(dim=1).values
    weights = torch.full_like(distances, 1 / max(m, 1)) if uniform else (-distances).softmax(1)
    recall = Recall(
        keys=draw(tasks, 3),
        slots=torch.arange(m).expand(tasks, m),
        distances=distances,
        weights=weights,
        values=values,
        generations=torch.zeros(tasks, m, dtype=torch.long),
        active=torch.ones(tasks, dtype=torch.bool),
    )
    return grads, recall


def permute_slots(recall, order):
    """Reorder the slots of all tasks, with everything that belongs to them."""
    return recall._replace(
        slots=recall.slots[:, order],
        distances=recall.distances[:, order],
        weights=recall.weights[:, order],
        values={name: value[:, order] for name, value in recall.values.items()},
        generations=recall.generations[:, order],
    )


def one_task(grads, recall, b):
    """Take task b of a case, keeping the task axis."""
    return {name: g[b : b + 1] for name, g in grads.items()}, recall._replace(
        keys=recall.keys[b : b + 1],
        slots=recall.slots[b : b + 1],
        distances=recall.distances[b : b + 1],
        weights=recall.weights[b : b + 1],
        values={name: value[b : b + 1] for name, value in recall.values.items()},
        generations=recall.generations[b : b + 1],
        active=recall.active[b : b + 1],
    )


def each_scalar(rule, grads, recall):
    """Apply ``rule(g, [V_1..V_m], [a_1..a_m]) -> float`` to every coordinate of every task."""
    result = {}
    for name, grad in grads.items():
        rows = []
        for b, row in enumerate(grad):
            a = recall.weights[b].tolist()
            slots = [slot.flatten().tolist() for slot in recall.values[name][b]]
            own = row.flatten().tolist()
            rows.append([rule(g, [slot[i] for slot in slots], a) for i, g in enumerate(own)])
        result[name] = torch.tensor(rows, dtype=grad.dtype).view(grad.shape)
    return result


def literal_mean(g, values, weights):
    """Eq. 8 as the paper writes it; the weights are not looked at."""
    return (g + sum(values)) / (len(values) + 1)


def literal_sum(g, values, weights):
    """Eq. 9 as the paper writes it; the weights are not looked at."""
    return g + sum(values) / len(values)


def weighted_mean(g, values, weights):
    m = len(values)
    return (g + m * sum(a * v for a, v in zip(weights, values, strict=True))) / (m + 1)


def weighted_sum(g, values, weights):
    return g + sum(a * v for a, v in zip(weights, values, strict=True))


def naive_sketch(name, x):
    """Count-sketch of a list of numbers by a loop over its coordinates."""
    generator = generator_for(0, "count-sketch", name)
    buckets = torch.randint(62, (len(x),), generator=generator).tolist()
    signs = torch.randint(2, (len(x),), generator=generator).tolist()
    sketch = [0.0] * 62
    for value, bucket, sign in zip(x, buckets, signs, strict=True):
        sketch[bucket] += value if sign else -value
    return sketch


def naive_description(name, x, g):
    """The 64 numbers that describe gradient ``x`` of one tensor beside the own gradient ``g``."""

    def norm(v):
        return math.sqrt(sum(i * i for i in v)) + 1e-12

    cosine = 0.0
    if g is not None:
        cosine = sum(i * j for i, j in zip(x, g, strict=True)) / (norm(x) * norm(g))
    unit = [i / norm(x) for i in x]
    return [*naive_sketch(name, unit), math.log(norm(x)), cosine]


def naive_encoder(state, x, *, layers, heads=4):
    """Pre-norm transformer with GELU on one sequence ``[t, d]``, one head and one query at a time."""

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(x, name, infix="."):
        return x @ state[f"{name}{infix}weight"].T + state[f"{name}{infix}bias"]

    for i in range(layers):
        layer = f"layers.{i}"
        projected = linear(norm(x, f"{layer}.norm1"), f"{layer}.self_attn.in_proj", "_")
        q, k, v = (part.chunk(heads, dim=1) for part in projected.chunk(3, dim=1))
        attended = [
            torch.cat([(k[h] @ row / math.sqrt(len(row))).softmax(0) @ v[h] for h, row in rows])
            for rows in ([(h, q[h][t]) for h in range(heads)] for t in range(len(x)))
        ]
        x = x + linear(torch.stack(attended), f"{layer}.self_attn.out_proj")
        hidden = linear(norm(x, f"{layer}.norm2"), f"{layer}.linear1")
        gelu = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(gelu, f"{layer}.linear2")
    return norm(x, "norm")


def naive_gate_increments(module, name, own, values, distances, *, kind):
    """Run one sequence of one tensor of one task through a transformer of these weights: u."""
    tokens = [module.cls]
    described = [] if own is None else [(own, module.types[0], None)]
    described += [(v, module.types[1], d) for v, d in zip(values, distances, strict=True)]
    for x, kind_of_token, d in described:
        description = torch.tensor(naive_description(name, x, own), dtype=module.cls.dtype)
        token = module.embed.weight @ description + module.embed.bias + kind_of_token
        if d is not None and module.distance is not None:
            token = token + d * module.distance
        tokens.append(token)
    state = module.encoder.state_dict()
    layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    hidden = naive_encoder(state, torch.stack(tokens) + module.kinds[kind], layers=layers)
    w = torch.cat([module.readout[0], module.readout[1]])
    return [float(w @ torch.cat([hidden[0], h])) for h in hidden[1:]]


def naive_gate(module, grads, recall, *, own_weight, weights, kinds):
    """Mix by (c_0 + u_0) g + Σ_j (c_j + u_j / m) V_j; ``grads`` None leaves g out."""
    result = {}
    for name, value in recall.values.items():
        rows = []
        for b in range(value.shape[0]):
            own = None if grads is None else grads[name][b].flatten().tolist()
            slots = [v.flatten().tolist() for v in value[b]]
            u = naive_gate_increments(
                module, name, own, slots, recall.distances[b].tolist(), kind=kinds[name]
            )
            mixed = [0.0] * len(slots[0])
            if own is not None:
                mixed = [(own_weight + u[0]) * g for g in own]
                u = u[1:]
            for j, slot in enumerate(slots):
                c = float(weights[b, j]) + u[j] / len(slots)
                mixed = [x + c * v for x, v in zip(mixed, slot, strict=True)]
            rows.append(mixed)
        shape = (value.shape[0], *value.shape[2:])
        result[name] = torch.tensor(rows, dtype=value.dtype).view(shape)
    return result


def naive_features(x, p=10.0):
    """Two features of one scalar."""
    if abs(x) >= math.exp(-p):
        return [math.log(abs(x)) / p, math.copysign(1.0, x)]
    return [-1.0, math.exp(p) * x]


class NaiveCoordinate(nn.Module):
    """Every coordinate as a sequence through torch's own post-norm encoder layer, read at cls."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 16)
        self.types = nn.Parameter(torch.zeros(2, 16))
        self.cls = nn.Parameter(torch.zeros(16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)
        self.readout = nn.Linear(16, 1)

    def increment(self, own, values):
        """Increment of one coordinate from its scalars; ``own`` None leaves g out."""
        scalars = [(v, 1) for v in values] if own is None else [(own, 0), *((v, 1) for v in values)]
        tokens = [self.cls]
        for x, kind in scalars:
            encoded = torch.tensor(naive_features(x), dtype=self.cls.dtype)
            tokens.append(self.embed(encoded) + self.types[kind])
        return float(self.readout(self.layer(torch.stack(tokens)[None])[0, 0]))
