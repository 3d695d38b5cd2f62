"""MTL against ANIL and the chain rule, and what its episodes leave alone."""

import torch

from tests.laws.cases import double, make_episode, make_params
from torchemo.config.registry import Part
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.hosting import host
from torchemo.learners.learner import start_of
from torchemo.models import MLP, Conv4, ResNet12
from torchemo.training.step import outer_step
from torchemo.training.trainer import Trainer

WAY = 3
MLP_SHAPE = TaskShape("classification", (2,), WAY)
IMAGES = TaskShape("classification", (2, 16, 16), WAY)


def built(name, model, shape, **options):
    return build_learner(Part(name, {"steps": 2, "inner_lr": 0.3, **options}), model, shape)


def conv(**options):
    return Conv4(WAY, in_channels=2, image_size=16, filters=3, activation="softplus", **options)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def image_tasks(seed=0):
    y = torch.arange(WAY).repeat(2, 2)
    return Episode(*(Batch(drawn(2, 6, 2, 16, 16, seed=seed + i), y) for i in range(2)))


def test_with_scales_of_one_it_is_anil_of_first_order_bit_for_bit():
    model = MLP(WAY, n_in=2, hidden=(4, 5), initializer="kaiming", activation="tanh")
    mtl = built("mtl", model, MLP_SHAPE)
    anil = built("anil", model, MLP_SHAPE, order=1)
    theta = double(anil.init(torch.Generator().manual_seed(3)))
    ones = {n: p.double() for n, p in mtl.init(torch.Generator()).items() if "/" in n}
    assert all((p == 1).all() for p in ones.values())
    ours = outer_step(mtl, {**theta, **ones}, make_episode())
    theirs = outer_step(anil, theta, make_episode())
    assert torch.equal(ours.losses, theirs.losses)
    for name, gradient in theirs.gradients.items():
        assert torch.equal(ours.gradients[name], gradient), name
    # A memory of offsets is given the gradients of what episodes move.
    assert theirs.rows.keys() - ours.rows.keys() == {"layer1.weight", "layer2.weight"}


def test_a_scale_has_the_gradient_of_its_kernel_times_the_kernel():
    model = conv(bn="none")
    mtl = built("mtl", model, IMAGES)
    anil = built("anil", model, IMAGES, order=1)
    params, episode = make_params(mtl), image_tasks()
    scaled = {n: p for n, p in params.items() if "/" not in n}
    for name in mtl.kernels:
        scaled[name] = params[name] * params[f"scale/{name}"]
    found = outer_step(mtl, params, episode).gradients
    plain = outer_step(anil, scaled, episode).gradients
    assert set(mtl.kernels) == {f"conv{i}.weight" for i in (1, 2, 3, 4)}
    for name in mtl.kernels:
        expected = (plain[name] * params[name]).sum((2, 3), keepdim=True)
        torch.testing.assert_close(found[f"scale/{name}"], expected, rtol=1e-9, atol=1e-13)
        # The kernel itself would get the gradient of the product times the scale.
        chained = plain[name] * params[f"scale/{name}"]
        torch.testing.assert_close(found[name], chained, rtol=1e-9, atol=1e-13)


def test_normalisation_sees_only_relative_scales_of_an_output_channel():
    mtl = built("mtl", conv(eps=1e-12), IMAGES)
    params, episode = make_params(mtl), image_tasks()
    before = outer_step(mtl, params, episode)
    for name in mtl.kernels:
        phi = params[f"scale/{name}"]
        radial = (before.gradients[f"scale/{name}"] * phi).sum((1, 2, 3))
        assert radial.abs().max() < 1e-9 < before.gradients[f"scale/{name}"].abs().max()
        by = torch.rand(len(phi), 1, 1, 1, dtype=torch.float64) + 0.5
        after = outer_step(mtl, {**params, f"scale/{name}": phi * by}, episode)
        torch.testing.assert_close(after.losses, before.losses, rtol=1e-8, atol=0)


def test_episodes_move_scales_shifts_and_head_and_no_kernel():
    mtl = built("mtl", conv(bn="running"), IMAGES)
    made = Trainer(mtl)
    before = {n: p.detach().clone() for n, p in made.params.items()}
    tasks = image_tasks()
    made.step(Episode(*(Batch(b.x.float(), b.y) for b in (tasks.support, tasks.query))))
    moved = {n for n, p in made.params.items() if not torch.equal(p, before[n])}
    stayed = made.params.keys() - moved
    assert stayed == {f"conv{i}.{part}" for i in (1, 2, 3, 4) for part in ("weight", "bias")}
    assert {"scale/conv1.weight", "norm1.scale", "norm1.shift", "norm4.mean", "head.bias"} <= moved


def test_where_nothing_is_normalised_the_bias_is_the_shift():
    mtl = built("mtl", conv(bn="none"), IMAGES)
    assert mtl.trains("conv1.bias")
    assert not mtl.trains("conv1.weight")
    assert not built("mtl", conv(), IMAGES).trains("conv1.bias")


def test_memories_hold_head_gradients_or_offsets_of_what_episodes_move():
    about = host(built("mtl", conv(), IMAGES))
    assert set(about.remembered("first")) == {"head.weight", "head.bias"}
    norm = {f"norm{i}.{part}" for i in (1, 2, 3, 4) for part in ("scale", "shift")}
    assert set(about.remembered("meta")) == {"head.weight", "head.bias", *norm}


def test_the_scales_of_a_narrow_resnet12_are_counted_as_the_method_card_does():
    sizes = {}
    for shortcuts in (False, True):
        model = ResNet12(5, channels="narrow", image_size=84)
        mtl = built(
            "mtl", model, TaskShape("classification", (3, 84, 84), 5), scale_shortcuts=shortcuts
        )
        sizes[shortcuts] = sum(s[0] * s[1] for s in mtl.kernels.values())
    assert (sizes[False], sizes[True] - sizes[False]) == (868_544, 172_224)


def test_every_task_begins_at_scaled_kernels():
    mtl = built("mtl", conv(), IMAGES)
    params, episode = make_params(mtl), image_tasks()
    base = expand({n: p for n, p in params.items() if "/" not in n}, 2)
    start = start_of(mtl, params, episode.support, base=base)
    for name in mtl.kernels:
        for b in range(2):
            product = params[name] * params[f"scale/{name}"]
            assert torch.equal(start.theta[name][b], product)
