import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.models.fused.oracles import NAMES, assert_same, derivatives, inputs, plain_block
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.models import fused
from torchemo.models.fused import conv_block

pytestmark = pytest.mark.skipif(not fused.status(bits=64).available, reason="no C compiler")

# images, channels in, filters, height, width
MAPS = [
    (2, 8, 8, 6, 6),
    (3, 8, 16, 7, 9),
    (1, 16, 8, 3, 3),
    (2, 8, 24, 2, 2),
    (2, 12, 5, 5, 4),
    (2, 3, 8, 6, 7),
    (60, 8, 8, 3, 2),
    (3, 32, 32, 21, 20),
]
PICTURES = [
    (2, 3, 8, 8, 8),
    (3, 3, 5, 9, 6),
    (2, 1, 16, 7, 5),
    (2, 2, 8, 2, 2),
    (2, 4, 8, 6, 4),
    (1, 1, 8, 3, 3),
    (2, 3, 32, 31, 30),
]


@pytest.mark.parametrize("shape", MAPS)
def test_two_derivatives_on_maps_equal_those_of_plain_torch(shape):
    tensors = inputs(*shape)
    assert_same(derivatives(conv_block, tensors), derivatives(plain_block, tensors))


@pytest.mark.parametrize("shape", [*PICTURES, (2, 8, 8, 6, 5)])
def test_two_derivatives_on_pictures_equal_those_of_plain_torch(shape):
    tensors = inputs(*shape, picture=True)
    assert_same(derivatives(conv_block, tensors), derivatives(plain_block, tensors))


@pytest.mark.parametrize(("shape", "picture"), [((2, 8, 8, 3, 4), False), ((2, 2, 8, 5, 4), True)])
def test_two_derivatives_equal_finite_differences(shape, picture):
    tensors = inputs(*shape, picture=picture)
    values = tuple(tensors[name] for name in NAMES)

    def block(x, weight, bias, scale, shift):
        return conv_block(x, weight, bias=bias, scale=scale, shift=shift, eps=1e-2)

    assert gradcheck(block, values)
    assert gradgradcheck(block, values, fast_mode=True)


def share_of_ties(tensors):
    y = torch.nn.functional.conv2d(tensors["x"], tensors["weight"], padding=1).detach()
    windows = y.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    ends = (windows.amax(-1, keepdim=True), windows.amin(-1, keepdim=True))
    return min(((windows == end).sum(-1) > 1).double().mean() for end in ends)


SIGNS = torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5, 0.0, 1.0, -2.0], dtype=torch.float64)


def test_ties_on_maps_and_scales_of_all_signs_get_the_subgradient_of_plain_torch():
    tensors = inputs(3, 8, 8, 7, 6)
    for name in ("x", "weight", "bias"):
        # Small whole numbers are exact whatever the order of additions, so equal elements stay equal.
        tensors[name] = (0.8 * tensors[name].detach()).trunc().requires_grad_()
    tensors["scale"] = SIGNS.clone().requires_grad_()
    assert share_of_ties(tensors) > 0.2
    assert_same(derivatives(conv_block, tensors), derivatives(plain_block, tensors))


@pytest.mark.parametrize(("channels", "picture"), [(3, True), (8, False)])
def test_ties_in_flat_regions_get_the_subgradient_of_plain_torch(channels, picture):
    tensors = inputs(2, channels, 8, 14, 13, picture=picture)
    coarse = tensors["x"].detach()[:, :, ::5, ::5]
    flat = coarse.repeat_interleave(5, 2).repeat_interleave(5, 3)[:, :, :14, :13]
    tensors["x"] = flat.clone().requires_grad_(not picture)
    tensors["scale"] = SIGNS.clone().requires_grad_()
    assert share_of_ties(tensors) > 0.2
    assert_same(derivatives(conv_block, tensors), derivatives(plain_block, tensors))


@pytest.mark.parametrize("value", [0.0, 0.7])
@pytest.mark.parametrize(("channels", "picture"), [(8, False), (3, True)])
def test_constant_inputs_equal_plain_torch(value, channels, picture):
    tensors = inputs(2, channels, 8, 6, 5, picture=picture)
    flat = torch.full_like(tensors["x"], value)
    tensors["x"] = flat.detach().requires_grad_(not picture)
    assert_same(derivatives(conv_block, tensors), derivatives(plain_block, tensors), tolerance=1e-9)


@pytest.mark.parametrize(("channels", "picture"), [(8, False), (3, True)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_hidden(channels, picture, value):
    tensors = inputs(2, channels, 8, 4, 4, picture=picture)
    broken = tensors["x"].detach().clone()
    broken[1, 0, 2, 2] = value
    with torch.no_grad():
        out = conv_block(broken, **{n: tensors[n] for n in NAMES[1:]}, eps=1e-3)
    assert out.isnan().all()


def test_the_bias_changes_nothing_and_its_gradient_is_exactly_zero():
    tensors = inputs(2, 8, 8, 4, 4)
    moved = {**tensors, "bias": (tensors["bias"].detach() + 5).requires_grad_()}
    ours, again = derivatives(conv_block, tensors), derivatives(conv_block, moved)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    bias_gradient = ours[3]
    assert bias_gradient.shape == (8,)
    assert not bias_gradient.any()


@pytest.mark.parametrize(("channels", "picture"), [(8, False), (3, True)])
@pytest.mark.parametrize("wanted", ["weight", "scale", "shift"])
def test_a_second_derivative_in_one_tensor_alone_equals_plain_torch(channels, picture, wanted):
    tensors = inputs(2, channels, 8, 5, 6, picture=picture)
    one = {name: t.detach() for name, t in tensors.items()}
    one[wanted].requires_grad_()
    assert_same(derivatives(conv_block, one), derivatives(plain_block, one))


@pytest.mark.parametrize(("channels", "picture"), [(8, False), (3, True)])
def test_layout_of_the_inputs_does_not_matter(channels, picture):
    tensors = inputs(2, channels, 8, 4, 6, picture=picture)
    strided = dict(tensors)
    for name in ("x", "weight"):
        turned = tensors[name].detach().transpose(0, -1).contiguous().transpose(0, -1)
        strided[name] = turned.requires_grad_(tensors[name].requires_grad)
    ours, again = derivatives(conv_block, tensors), derivatives(conv_block, strided)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize(("channels", "picture"), [(8, False), (3, True), (8, True)])
@pytest.mark.parametrize("through", ["weight", "cotangent"])
def test_a_third_derivative_is_refused_in_words(channels, picture, through):
    tensors = inputs(2, channels, 8, 4, 4, picture=picture)
    out = conv_block(**tensors, eps=1e-3)
    weight = tensors["weight"]
    cotangent = out.detach().cos().requires_grad_()
    (first,) = torch.autograd.grad(out, weight, cotangent, create_graph=True)
    inside = weight if through == "weight" else cotangent
    (second,) = torch.autograd.grad(first.square().sum(), inside, create_graph=True)
    with pytest.raises(ConfigError, match="third derivative"):
        torch.autograd.grad(second.sum(), weight)


def test_single_precision_is_no_less_precise_than_plain_torch():
    ratios = []
    for seed in range(8):
        for shape, picture in (((4, 16, 16, 14, 14), False), ((4, 3, 16, 20, 20), True)):
            exact = derivatives(plain_block, inputs(*shape, picture=picture, seed=seed))
            single = inputs(*shape, picture=picture, seed=seed, dtype=torch.float32)
            errors = [
                sum(
                    ((got.double() - want).norm() / (want.norm() + 1e-3)).item()
                    for got, want in zip(derivatives(block, single), exact, strict=True)
                )
                for block in (conv_block, plain_block)
            ]
            ratios.append(errors[0] / errors[1])
    assert sorted(ratios)[len(ratios) // 2] <= 1.0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x": torch.zeros(2, 8, 1, 4)}, "at least 2"),
        ({"x": torch.zeros(0, 8, 4, 4)}, "should get"),
        ({"x": torch.zeros(2, 7, 4, 4)}, "should get"),
        ({"weight": torch.zeros(8, 8, 5, 5)}, "should get"),
        ({"scale": torch.zeros(7)}, "should get"),
        ({"shift": torch.zeros(8, dtype=torch.float64)}, "one type"),
        ({"x": torch.zeros(2, 8, 4, 4, dtype=torch.float64)}, "one type"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, word):
    good = inputs(2, 8, 8, 4, 4, dtype=torch.float32)
    with pytest.raises(ShapeError, match=word):
        conv_block(**{**good, **change}, eps=1e-3)
