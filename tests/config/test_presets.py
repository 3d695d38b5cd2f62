"""Presets can be built and run; the literal one is the ledger's literal reading."""

from dataclasses import replace

import pytest

from tests.test_paper_ledger import literal_reading
from torchemo.config.presets import at_once, names, preset
from torchemo.config.run import DataConfig, ModelConfig
from torchemo.core.errors import ConfigError
from torchemo.data.source import open_source
from torchemo.runs.build import remembered_shapes
from torchemo.runs.experiment import build_trainer

SMALL = DataConfig(image_size=16, classes_per_family=25, n_way=2, n_query=2)


@pytest.fixture(scope="module")
def pictures():
    return open_source(SMALL)


@pytest.mark.parametrize("name", names())
def test_every_preset_takes_outer_steps_on_pictures(name, pictures):
    config = replace(preset(name), model=ModelConfig(filters=2))
    config = replace(config, learner=replace(config.learner, steps=1, minibatch=None))
    trainer = build_trainer(config, pictures.shape)
    for i in range(2):
        report = trainer.step(pictures.sample("train", seed=0, start=2 * i, count=2))
        assert report.losses.isfinite().all()
    assert (trainer.emo is not None) == ("-emo" in name)


# The literal reading stores sums over the support set and steps along them at every inner step: on
# regression, where gradients are large, that diverges within two batches for some learners.
FINITE = [
    n for n in names() if not n.startswith("proto") and not n.endswith(("-paper", "-published"))
]


@pytest.mark.parametrize("name", FINITE)
def test_every_preset_of_ours_takes_outer_steps_on_regression(name):
    config = preset(name, regression=True)
    source = open_source(config.data)
    trainer = build_trainer(config, source.shape)
    for i in range(2):
        report = trainer.step(source.sample("train", seed=0, start=4 * i, count=4))
        assert report.losses.isfinite().all()


def test_on_pictures_slots_of_whole_networks_learn_after_the_learner(pictures):
    config = preset("maml-emo")
    small = replace(config, model=ModelConfig(filters=2))
    made = build_trainer(small, pictures.shape)
    names = set(remembered_shapes(small.emo, made.learner))
    assert names == set(made.learned) == set(made.params)
    alone = preset("maml")
    assert made.emo.policy.warmup == alone.train.iterations == config.train.iterations / 2
    assert (config.learner, config.outer) == (alone.learner, alone.outer)
    assert (config.emo.retrieval.familiar, config.emo.retrieval.trust) == (0.9, 0.0)
    for other in (preset("maml-emo", regression=True), preset("musml-emo")):
        assert other.emo.memory.afterwards is None
        assert (other.emo.retrieval.familiar, other.emo.retrieval.trust) == (None, None)


def test_a_learner_of_two_stages_may_not_rest_before_the_second(pictures):
    config = preset("tsa-maml-emo")
    assert build_trainer(config, pictures.shape).turn == 1000
    short = replace(config, train=replace(config.train, iterations=1000))
    with pytest.raises(
        ConfigError, match="forms its groups at step 564, and is to rest at step 500"
    ):
        build_trainer(short, pictures.shape)


def test_at_once_slots_hold_scales_and_shifts_and_what_has_none_is_left_alone(pictures):
    small = replace(at_once(preset("maml-emo")), model=ModelConfig(filters=2))
    learner = build_trainer(small, pictures.shape).learner
    assert set(remembered_shapes(small.emo, learner)) == set(learner.loop.model.norm)
    assert small.emo.value.recall_dropout == 0.2
    for name in ("maml", "maml-emo-paper", "musml-emo"):
        assert at_once(preset(name)) == preset(name)
    points = preset("maml-emo", regression=True)
    assert at_once(points) == points


def test_published_sizes_are_refused_for_regression():
    with pytest.raises(ConfigError, match="for pictures"):
        preset("arml-published", regression=True)


@pytest.mark.parametrize("n_shot", [1, 5])
@pytest.mark.parametrize(
    ("name", "ledger"), [("maml", "MAML"), ("anil", "ANIL"), ("meta-sgd", "Meta-SGD")]
)
def test_the_literal_preset_is_the_literal_reading_of_the_ledger(name, ledger, n_shot):
    emo, own = literal_reading(ledger, f"{n_shot}-shot")
    config = preset(f"{name}-emo-paper", n_shot=n_shot)
    assert config.emo == emo
    assert config.outer == own["outer"]
    assert config.learner.inner_lr == own["learner"].inner_lr
