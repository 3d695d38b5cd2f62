import pytest
import torch

from torchemo.core.rng import generator_for
from torchemo.core.tree import expand
from torchemo.core.types import Model
from torchemo.models import MODELS, Conv4

CASES = {
    "conv4": ({"image_size": 16, "filters": 2}, (3, 16, 16)),
    "resnet12": ({"image_size": 16, "channels": (2, 2, 2, 2)}, (3, 16, 16)),
    "mlp": ({"n_in": 4}, (4,)),
}


def test_every_registered_network_has_a_case_here():
    # A pretrained network needs its weights; tests/models/pretrained has a case with stand-ins.
    assert set(MODELS) - {"efficientnet-lite0"} == set(CASES)
    assert MODELS["conv4"] is Conv4


@pytest.mark.parametrize("name", CASES)
def test_every_registered_network_is_a_model_and_maps_tasks_to_outputs(name):
    options, example = CASES[name]
    model = MODELS[name](5, **options)
    assert isinstance(model, Model)
    params = model.init(generator_for(0))
    assert set(params) >= {*model.head, *model.norm, *model.buffers}
    assert not any(p.requires_grad for p in params.values())
    x = torch.rand(2, 6, *example, generator=generator_for(1))
    out = model.at(0)(expand(params, 2), x)
    assert out.shape == (2, 6, 5)
    assert torch.equal(out, model.classify(expand(params, 2), model.features(expand(params, 2), x)))
