import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

from tests.models.oracles import (
    assert_trees_close,
    conv4_module,
    derivatives,
    module_names,
    per_task,
    randomised,
)
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.losses import cross_entropy
from torchemo.core.rng import generator_for
from torchemo.core.tree import expand, select
from torchemo.core.types import Model
from torchemo.models import Conv4, lift


def pair(tasks=2, **options):
    """The same network twice, lifted and functional, with the same per-task parameters."""
    model = Conv4(3, filters=2, image_size=16, **options)
    generator = generator_for(2, "pair")
    params = per_task(randomised(model.init(generator), generator), tasks, generator)
    x = torch.rand(tasks, 6, 3, 16, 16, generator=generator, dtype=torch.float64)
    lifted = lift(conv4_module(model), head="head")
    return model, lifted, params, x, torch.arange(3).repeat(tasks, 2)


def small(*, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))


def test_lifted_network_equals_the_functional_one_up_to_second_order():
    model, lifted, params, x, y = pair()
    directions = {
        n: torch.randn(p.shape, generator=generator_for(1, n)).double() for n, p in params.items()
    }
    ours = derivatives(lambda p: cross_entropy(model(p, x), y).sum(), params, directions)
    theirs = derivatives(
        lambda p: cross_entropy(lifted(module_names(p), x), y).sum(), params, directions
    )
    torch.testing.assert_close(theirs[0], ours[0], rtol=1e-10, atol=1e-10)
    for got, expected in zip(theirs[1:], ours[1:], strict=True):
        assert_trees_close(got, expected, tolerance=1e-10)


def test_features_are_what_the_head_sees_and_classify_is_the_head():
    model, lifted, params, x, _ = pair()
    params = module_names(params)
    body = {n: p for n, p in params.items() if n not in lifted.head}
    features = lifted.features(body, x)
    torch.testing.assert_close(
        features, model.features(dict(zip(pair()[2], params.values(), strict=True)), x)
    )
    assert torch.equal(lifted.classify(select(params, lifted.head), features), lifted(params, x))


def test_names_follow_the_module():
    _, lifted, _, _, _ = pair()
    assert isinstance(lifted, Model)
    assert lifted.head == ("head.weight", "head.bias")
    assert lifted.norm == tuple(f"norm{i}.{k}" for i in (1, 2, 3, 4) for k in ("weight", "bias"))
    assert lifted.buffers == ()
    assert lifted.at(3, stored=True, sink={}) is lifted
    every = nn.Sequential(
        nn.GroupNorm(1, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4, affine=True), nn.Linear(4, 2)
    )
    assert lift(every, "3").norm == tuple(f"{i}.{k}" for i in range(3) for k in ("weight", "bias"))
    assert lift(nn.Sequential(nn.Linear(3, 2, bias=False)), "0").head == ("0.weight",)


def test_init_returns_copies_of_the_modules_own_parameters():
    module = small()
    params = lift(module, "2").init(generator_for(0))
    assert list(params) == [n for n, _ in module.named_parameters()]
    params["0.weight"].zero_()
    assert module[0].weight.any()
    assert not params["0.bias"].requires_grad


def test_the_users_module_is_neither_changed_nor_followed():
    module = small()
    before = {n: p.clone() for n, p in module.named_parameters()}
    lifted = lift(module, "2")
    params, x = expand(lifted.init(generator_for(0)), 2), torch.rand(2, 4, 3)
    first = lifted({n: 2 * p for n, p in params.items()}, x)
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    nn.init.zeros_(module[0].weight)
    assert torch.equal(lifted.init(generator_for(0))["0.weight"], before["0.weight"])
    assert torch.equal(lifted({n: 2 * p for n, p in params.items()}, x), first)


def test_two_threads_give_what_one_gives():
    _, lifted, params, x, y = pair()
    tasks = [module_names({n: p.detach() * (1 + i) for n, p in params.items()}) for i in range(8)]
    barrier = Barrier(2)

    def work(p):
        leaves = {n: v.clone().requires_grad_() for n, v in p.items()}
        loss = cross_entropy(lifted(leaves, x), y).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(leaves.values()))])

    def together(p):
        barrier.wait(timeout=30)
        return work(p)

    serial = [work(p) for p in tasks]
    with ThreadPoolExecutor(2) as pool:
        parallel = list(pool.map(together, tasks))
    assert all(torch.equal(a, b) for a, b in zip(serial, parallel, strict=True))


def test_every_thread_has_a_module_of_its_own():
    meeting = Barrier(2)
    seen = []

    class Meet(nn.Module):
        def forward(self, x):
            seen.append(id(self))
            meeting.wait(timeout=30)
            return x

    lifted = lift(nn.Sequential(Meet(), nn.Linear(3, 2)), "1")
    params, x = expand(lifted.init(generator_for(0)), 1), torch.rand(1, 4, 3)
    with ThreadPoolExecutor(2) as pool:
        outs = list(
            pool.map(lambda scale: lifted({n: scale * p for n, p in params.items()}, x), (1, 3))
        )
    assert len(set(seen)) == 2
    torch.testing.assert_close(outs[1], 3 * outs[0])


def test_buffers_follow_the_precision_of_the_parameters():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    module[0].running_mean.fill_(0.5)
    lifted = lift(module, "1")
    params = {n: p.double() for n, p in expand(lifted.init(generator_for(0)), 1).items()}
    x = torch.rand(1, 4, 3, dtype=torch.float64)
    expected = module.double()(x[0])
    torch.testing.assert_close(lifted(params, x)[0], expected)


def test_a_buffer_written_in_the_forward_pass_does_not_reach_the_next_task():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    lifted = lift(nn.Sequential(Counts(), nn.Linear(3, 2)), "1")
    params, x = expand(lifted.init(generator_for(0)), 2), torch.rand(1, 4, 3).expand(2, 4, 3)
    out = lifted(params, x)
    assert torch.equal(out[0], out[1])
    assert torch.equal(lifted(params, x), out)


def test_nothing_of_a_call_is_kept_alive():
    lifted = lift(small(), "2")
    params = expand(lifted.init(generator_for(0)), 1)
    features = torch.rand(1, 4, 8)
    x = torch.rand(1, 4, 3)
    lifted(params, x)
    lifted.classify(params, features)
    kept = [weakref.ref(features), weakref.ref(x)]
    del features, x
    assert [ref() for ref in kept] == [None, None]


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)]
)
def test_running_statistics_in_training_are_refused_with_the_remedy(layer):
    module = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 2))
    with pytest.raises(ConfigError, match=r"layer '1'(.|\n)*track_running_stats=False(.|\n)*eval"):
        lift(module, "2")
    lift(module.eval(), "2")


def test_batch_norm_without_running_statistics_is_accepted_in_training():
    lift(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)), "1")


def test_dropout_in_training_is_refused_because_it_cannot_be_repeated():
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))
    with pytest.raises(ConfigError, match="global random state"):
        lift(module, "1")
    lift(module.eval(), "1")


def test_a_layer_without_shape_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older versions of torch announce lazy layers
        module = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="no shape yet"):
        lift(module, "1")


@pytest.mark.parametrize(("head", "got"), [("fc", "no such layer"), ("1", "a ReLU")])
def test_a_head_that_is_not_a_linear_layer_is_refused_with_the_candidates(head, got):
    with pytest.raises(ConfigError, match=rf"head '{head}'.*got {got}(.|\n)*0, 2"):
        lift(small(), head)


def test_a_network_without_linear_layers_is_told_to_end_with_one():
    with pytest.raises(ConfigError, match="end the network with one"):
        lift(nn.Sequential(nn.ReLU()))


def test_a_head_that_shares_its_weight_is_refused():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    with pytest.raises(ConfigError, match="shares a tensor"):
        lift(module, "1")


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)),
        nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Linear(3, 2), nn.Flatten()),
    ],
)
def test_work_after_the_head_is_refused_at_the_first_call(module):
    name = "1" if isinstance(module[0], nn.Unflatten) else "0"
    lifted = lift(module, name)
    params = expand(lifted.init(generator_for(0)), 1)
    with pytest.raises(ConfigError, match="output should be the network's output"):
        lifted(params, torch.rand(1, 4, 3))


def test_inputs_and_parameters_without_task_axis_are_refused():
    lifted = lift(small(), "2")
    params, x = lifted.init(generator_for(0)), torch.rand(2, 4, 3)
    with pytest.raises(ShapeError, match="task axis"):
        lifted(expand(params, 2), x[0])
    with pytest.raises(ShapeError, match="expand"):
        lifted(params, x)
    with pytest.raises(ShapeError, match=r"'0.weight' should have shape \[2,"):
        lifted(expand(params, 3), x)
    with pytest.raises(ShapeError, match=r"'2.bias' is missing"):
        lifted.classify({"2.weight": expand(params, 2)["2.weight"]}, torch.rand(2, 4, 8))


class Attends(nn.Module):
    """Attention over four rows, then a head; ``plain`` writes it out."""

    def __init__(self, *, plain):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.fc, self.plain = nn.Linear(4, 12), nn.Linear(4, 3), plain

    def forward(self, x):
        q, k, v = self.qkv(x.view(-1, 1, 4, 4)).chunk(3, -1)
        if self.plain:
            rows = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        else:
            rows = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.fc(rows.mean((1, 2)))


def test_attention_has_second_derivatives_in_threads_too_and_torch_keeps_its_setting():
    x, y = torch.rand(2, 6, 16, generator=generator_for(0)).double(), torch.arange(3).repeat(2, 2)
    draw = generator_for(3)
    nets = [lift(Attends(plain=plain).double()) for plain in (False, True)]
    params = expand(nets[0].init(draw), 2)
    ways = {n: torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in params.items()}

    def found(net):
        leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
        return derivatives(lambda p: cross_entropy(net(p, x), y).sum(), leaves, ways)

    before = torch.backends.cuda.flash_sdp_enabled()
    with ThreadPoolExecutor(2) as pool:
        several = list(pool.map(found, [nets[0]] * 6))
    expected = found(nets[1])
    for got in several:
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    assert torch.backends.cuda.flash_sdp_enabled() == before
