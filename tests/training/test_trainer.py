"""The outer loop: what a step changes, what it must leave alone, and that it learns."""

import copy

import pytest
import torch

from tests.laws.cases import LEARNER_CASES, make_emo, make_episode, make_learner
from torchemo.config.run import EMOConfig, KeyConfig, LearnerConfig, MemoryConfig, ValueConfig
from torchemo.core.errors import ConfigError, Diverged
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners.build import build_learner
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.models import MLP, Conv4
from torchemo.runs.build import build_emo
from torchemo.training import trainer as train
from torchemo.training.step import outer_step
from torchemo.training.trainer import OuterConfig, Trainer


def trainer(case="maml", emo=None, **options):
    made = Trainer(make_learner(case), emo=emo, **options)
    for p in made.params.values():
        p.data = p.data.double()
    return made


def test_a_step_is_one_adam_step_along_the_meta_gradient():
    ours = trainer(config=OuterConfig(lr=0.01, clip=None))
    theirs = {n: p.detach().clone().requires_grad_() for n, p in ours.params.items()}
    adam = torch.optim.Adam(theirs.values(), lr=0.01)
    for i in range(3):
        episode = make_episode(i)
        for name, gradient in outer_step(ours.learner, theirs, episode).gradients.items():
            theirs[name].grad = gradient
        adam.step()
        ours.step(episode)
    for name, p in theirs.items():
        torch.testing.assert_close(ours.params[name], p, rtol=1e-13, atol=0)


def test_scheduled_rates_are_those_of_torch_cosine_annealing():
    ours = trainer(config=OuterConfig(lr=0.01, clip=None, schedule="cosine"), horizon=5)
    theirs = {n: p.detach().clone().requires_grad_() for n, p in ours.params.items()}
    adam = torch.optim.Adam(theirs.values(), lr=0.01)
    annealed = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=5)
    for i in range(5):
        episode = make_episode(i)
        for name, gradient in outer_step(ours.learner, theirs, episode).gradients.items():
            theirs[name].grad = gradient
        adam.step()
        annealed.step()
        ours.step(episode)
    for name, p in theirs.items():
        torch.testing.assert_close(ours.params[name], p, rtol=1e-13, atol=0)


@pytest.mark.parametrize("case", ["meta-sgd", "maml++"])
def test_learned_inner_rates_can_have_an_outer_rate_of_their_own(case):
    ours = trainer(case, config=OuterConfig(lr=0.01, rates_lr=1e-4, clip=None))
    theirs = {n: p.detach().clone().requires_grad_() for n, p in ours.params.items()}
    adams = [
        torch.optim.Adam([p for n, p in theirs.items() if n.startswith("rate/") == rates], lr=lr)
        for rates, lr in ((False, 0.01), (True, 1e-4))
    ]
    for i in range(3):
        episode = make_episode(i)
        for name, gradient in outer_step(ours.learner, theirs, episode).gradients.items():
            theirs[name].grad = gradient
        for adam in adams:
            adam.step()
        ours.step(episode)
    for name, p in theirs.items():
        torch.testing.assert_close(ours.params[name], p, rtol=1e-13, atol=0)


def test_a_schedule_without_the_length_of_the_training_is_refused():
    with pytest.raises(ConfigError, match="horizon"):
        trainer(config=OuterConfig(schedule="cosine"))


def test_training_with_an_unused_memory_equals_training_without_bit_for_bit():
    """Clipping is per group, and Adam is per tensor: an untrained gate does not disturb the learner."""
    plain = trainer(config=OuterConfig(clip=0.01))
    with_emo = trainer(
        config=OuterConfig(clip=0.01), emo=make_emo("sum", plain.learner, capacity=0)
    )
    for i in range(3):
        plain.step(make_episode(i))
        with_emo.step(make_episode(i))
    for name, p in plain.params.items():
        assert torch.equal(p, with_emo.params[name])


def seen(made):
    return {n: p.detach().clone() for n, p in made.params.items()}


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("case", list(LEARNER_CASES))
def test_afterwards_the_learner_is_that_without_memory_bit_for_bit_and_slots_learn(case, schedule):
    """With the rates of a training that ends where the slots begin; then nothing of the learner moves."""
    emo = make_emo("consolidate", make_learner(case), filled=False, afterwards=0.5)
    config = OuterConfig(schedule=schedule)
    plain = trainer(case, config=config, horizon=4)
    made = trainer(case, emo=emo, config=config, horizon=8)
    for i in range(4):
        assert len(emo.memory) == 0
        assert not made.rests
        plain.step(make_episode(i))
        made.step(make_episode(i))
    learned, factors = seen(made), []
    assert all(torch.equal(p, learned[n]) for n, p in seen(plain).items())
    slots = {n: v.clone() for n, v in emo.memory.values.items()}
    for i in range(4, 8):
        assert made.rests
        factors.append(made.rate_factor)
        made.step(make_episode(i))
    assert seen(made).keys() == learned.keys()
    assert all(torch.equal(p, learned[n]) for n, p in seen(made).items())
    assert slots
    assert any(not torch.equal(v, emo.memory.values[n]) for n, v in slots.items())
    halves = [1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]  # cos of 0, 45, 90, 135 degrees
    assert factors == pytest.approx(halves if schedule == "cosine" else [1.0] * 4)


def test_slots_that_learn_afterwards_need_the_length_of_the_training():
    emo = make_emo("consolidate", make_learner("maml"), filled=False, afterwards=0.5)
    with pytest.raises(ConfigError, match="length of the training"):
        trainer(emo=emo)


@pytest.mark.parametrize("part", ["emo_gradients", "values"])
def test_a_memory_that_diverges_is_refused_before_anything_changes(part, monkeypatch):
    made = trainer(emo=make_emo("gated", make_learner("maml")))
    before = {n: p.detach().clone() for n, p in made.params.items()}
    gates = [p.detach().clone() for p in made.emo.parameters()]

    def poisoned(*args, **options):
        found = outer_step(*args, **options)
        bad = {n: torch.full_like(t, torch.nan) for n, t in getattr(found, part).items()}
        assert bad
        return found._replace(**{part: bad})

    monkeypatch.setattr(train, "outer_step", poisoned)
    with pytest.raises(Diverged):
        made.step(make_episode())
    assert all(torch.equal(p, before[n]) for n, p in made.params.items())
    assert all(torch.equal(p, q) for p, q in zip(made.emo.parameters(), gates, strict=True))


def test_reptile_steps_by_plain_sgd_towards_the_adapted_parameters():
    made = trainer("reptile", config=OuterConfig(lr=0.5, optimizer="sgd", clip=None))
    before = {n: p.detach().clone() for n, p in made.params.items()}
    rows = outer_step(made.learner, made.params, make_episode()).rows
    made.step(make_episode())
    for name, p in made.params.items():
        torch.testing.assert_close(
            p, before[name] - 0.5 * rows[name].mean(0), rtol=1e-13, atol=1e-15
        )


def test_a_step_remembers_its_tasks_and_trains_the_aggregator():
    emo = make_emo("gated", make_learner("maml"), trained=False)
    made = trainer(emo=emo)
    gates = emo.aggregator.gate.detach().clone()
    generation = emo.memory.ledger.generation.clone()
    report = made.step(make_episode())
    assert report.recall.m > 0
    assert (emo.memory.ledger.generation - generation).sum() == 2
    assert not torch.equal(emo.aggregator.gate, gates)


def test_a_diverged_step_names_the_task_and_changes_nothing():
    emo = make_emo("sum", make_learner("maml"))
    made = trainer(emo=emo)
    episode = make_episode()
    bad = Episode(episode.support, episode.query, index=torch.tensor([7, 8]))
    made.params["head.bias"].data[0] = torch.nan
    before = copy.deepcopy((made.params, emo.state_dict()))
    with pytest.raises(Diverged, match="task 7"):
        made.step(bad)
    for name, p in made.params.items():
        assert torch.equal(p.nan_to_num(), before[0][name].nan_to_num())
    assert all(torch.equal(t, before[1][n]) for n, t in emo.state_dict().items())
    assert made.iteration == 0


def test_a_gradient_that_is_not_finite_is_refused_though_losses_are(monkeypatch):
    made = trainer()
    real = outer_step(made.learner, made.params, make_episode())
    worse = {**real.gradients, "head.bias": torch.full_like(real.gradients["head.bias"], torch.nan)}
    monkeypatch.setattr(
        "torchemo.training.trainer.outer_step", lambda *a, **k: real._replace(gradients=worse)
    )
    before = copy.deepcopy(made.params)
    with pytest.raises(Diverged, match="the learner"):
        made.step(make_episode())
    assert all(torch.equal(p, before[n]) for n, p in made.params.items())
    assert made.iteration == 0


def running_statistics(**emo):
    """Return a trainer whose network averages statistics, and a task for it."""
    shape = TaskShape("classification", (1, 16, 16), 2)
    model = Conv4(2, in_channels=1, image_size=16, filters=2, bn="per_step_running", bn_steps=3)
    learner = build_learner(LearnerConfig(steps=2), model, shape)
    g = torch.Generator().manual_seed(0)
    y = torch.arange(2).expand(2, 2).contiguous()
    batch = lambda: Batch(torch.rand(2, 2, 1, 16, 16, generator=g), y)  # noqa: E731
    memory = build_emo(EMOConfig(**emo), learner, shape) if emo else None
    return Trainer(learner, emo=memory, horizon=2), Episode(batch(), batch())


def test_a_learner_that_rests_averages_no_statistics():
    made, episode = running_statistics(
        memory=MemoryConfig(capacity=2, write="consolidate", afterwards=0.5),
        value=ValueConfig(content="meta"),
        key=KeyConfig(network="statistics", training="none"),
    )
    drawn = seen(made)
    made.step(episode)
    learned = seen(made)
    made.step(episode)
    names = made.learner.loop.model.buffers
    assert all(not torch.equal(learned[n], drawn[n]) for n in names)
    assert all(torch.equal(p, learned[n]) for n, p in seen(made).items())


def test_running_statistics_are_averaged_and_used_in_evaluation():
    made, episode = running_statistics()
    model = made.learner.loop.model
    before = {n: made.params[n].detach().clone() for n in model.buffers}
    made.step(episode)
    assert model.buffers
    for name in model.buffers:
        rows_moved = (made.params[name] != before[name]).any(1)
        assert rows_moved.tolist() == [
            True,
            True,
            True,
        ]  # support at steps 0 and 1, queries after 2
        assert made.params[name].grad is None


def test_keys_that_recognise_themselves_are_left_out_of_the_outer_optimizer():
    shape = TaskShape("regression", (1,), 1, n_shot=5)
    learner = build_learner(LearnerConfig(steps=1, inner_lr=0.01), MLP(1), shape)
    key = KeyConfig(embedder="pairs", layers=1, dim=8, heads=2, ff=8, training="self_recognition")
    config = EMOConfig(
        key=key,
        memory=MemoryConfig(capacity=3, write="consolidate", warmup=2),
        value=ValueConfig(content="meta"),
    )
    emo = build_emo(config, learner, shape)
    recognition = SelfRecognition(emo.encoder, lr=1e-2, every=1)
    made = Trainer(learner, emo=emo, recognition=recognition)
    assert not any(n.startswith("encoder") for n in made.emo_learned)
    g = torch.Generator().manual_seed(0)
    batch = lambda: Batch(*torch.randn(2, 4, 5, 1, generator=g))  # noqa: E731
    weights = [p.detach().clone() for p in emo.encoder.parameters()]
    reports = [made.step(Episode(batch(), batch())) for _ in range(3)]
    assert all(r.recognition_loss > 0 for r in reports)
    assert any(
        not torch.equal(a, b) for a, b in zip(weights, emo.encoder.parameters(), strict=True)
    )
    assert len(emo.memory) == 3
    assert recognition.lr == pytest.approx(2e-3)  # slowed down once the slots were seeded


def consolidating(horizon, *, every=1):
    shape = TaskShape("regression", (1,), 1, n_shot=5)
    learner = build_learner(LearnerConfig(steps=1, inner_lr=0.01), MLP(1), shape)
    key = KeyConfig(embedder="pairs", layers=1, dim=8, heads=2, ff=8, training="self_recognition")
    memory = MemoryConfig(capacity=3, write="consolidate", warmup=2)
    emo = build_emo(
        EMOConfig(key=key, memory=memory, value=ValueConfig(content="meta")), learner, shape
    )
    return Trainer(
        learner,
        emo=emo,
        recognition=SelfRecognition(emo.encoder, lr=1e-2, every=every),
        config=OuterConfig(schedule="cosine"),
        horizon=horizon,
    )


def test_after_the_start_up_keys_are_trained_at_every_so_many_steps_and_see_all_support_sets():
    made, g = consolidating(horizon=100, every=3), torch.Generator().manual_seed(0)
    batch = lambda: Batch(*torch.randn(2, 4, 5, 1, generator=g))  # noqa: E731
    trained = [made.step(Episode(batch(), batch())).recognition_loss is not None for _ in range(8)]
    assert trained == [True, True, False, True, False, False, True, False]  # warmup = 2
    assert int(made.recognition.state_dict()["pushed"]) == 8 * 4
    assert made.recognition.lr == pytest.approx(
        6e-3
    )  # a fifth of the pace: three fifths of the rate


def test_once_the_schedule_has_ended_nothing_learned_moves_any_more():
    made, g = consolidating(horizon=4), torch.Generator().manual_seed(0)
    batch = lambda: Batch(*torch.randn(2, 4, 5, 1, generator=g))  # noqa: E731

    def content():
        slots = {"keys": made.emo.memory.keys, **made.emo.memory.values}
        learned = {**made.params, **dict(made.emo.named_parameters()), **slots}
        return {n: t.detach().clone() for n, t in learned.items()}

    for _ in range(4):
        made.step(Episode(batch(), batch()))
    before = content()
    made.step(Episode(batch(), batch()))
    after = content()
    assert any(v.any() for n, v in before.items() if n in made.emo.memory.values)
    for name, value in before.items():
        # Slot keys are put back on the unit sphere: up to rounding.
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"clip": -1.0}])
def test_impossible_outer_choices_are_refused(wrong):
    with pytest.raises(ConfigError):
        OuterConfig(**wrong)
