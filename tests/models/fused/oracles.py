"""The block in plain torch operations, and the derivatives of any block by autograd."""

import torch
import torch.nn.functional as F

NAMES = ("x", "weight", "bias", "scale", "shift")


def plain_block(x, weight, *, bias, scale, shift, eps):
    y = F.conv2d(x, weight, bias, padding=1)
    centred = y - y.mean((0, 2, 3), keepdim=True)
    rstd = (centred.square().mean((0, 2, 3), keepdim=True) + eps).rsqrt()
    z = centred * rstd * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)
    return F.max_pool2d(F.relu(z), 2)


def inputs(n, channels, filters, height, width, *, picture=False, seed=0, dtype=torch.float64):
    """Random tensors of one block; images are positive and need no gradient."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x = draw(n, channels, height, width)
    values = {
        "x": x.abs() + 0.3 if picture else x,
        "weight": draw(filters, channels, 3, 3),
        "bias": draw(filters),
        "scale": draw(filters),
        "shift": 0.5 * draw(filters),
    }
    return {
        name: v.to(dtype).requires_grad_(name != "x" or not picture) for name, v in values.items()
    }


def derivatives(block, tensors, *, eps=1e-3, seed=1):
    """Output, gradient and the gradient of a random function of both, in all tensors and the cotangent."""
    g = torch.Generator().manual_seed(seed)

    def like(t):
        return torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype)

    x, weight, *rest = (tensors[name] for name in NAMES)
    out = block(x, weight, **dict(zip(NAMES[2:], rest, strict=True)), eps=eps)
    wanted = [t for t in (x, weight, *rest) if t.requires_grad]
    cotangent = like(out).requires_grad_()
    first = torch.autograd.grad(out, wanted, cotangent, create_graph=True)
    objective = sum((f * like(f)).sum() for f in first) + (out.sin() * like(out)).sum()
    second = torch.autograd.grad(objective, [*wanted, cotangent])
    return [t.detach() for t in (out, *first, *second)]


def assert_same(ours, theirs, *, tolerance=1e-11):
    """Every tensor agrees relative to its largest element, or to the largest of all if it is nearly zero."""
    largest = max(float(t.abs().max()) for t in theirs)
    for got, expected in zip(ours, theirs, strict=True):
        scale = max(float(expected.abs().max()), 1e-3 * largest)
        assert float((got - expected).abs().max()) <= tolerance * scale
