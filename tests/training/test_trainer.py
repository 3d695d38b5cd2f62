"""The outer loop: what a step changes, what it must leave alone, and that it learns."""

import copy

import pytest
import torch

from tests.laws.cases import (
    LEARNER_CASES,
    OFFSETS,
    fitting_memories,
    make_episode,
    make_learner,
    make_memory,
)
from torchemo.config.registry import Part
from torchemo.config.run import OuterConfig
from torchemo.core.errors import ConfigError, Diverged
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.hosting import host
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.memory.offsets import OffsetMemory, OffsetOptions
from torchemo.models import MLP, Conv4
from torchemo.training import trainer as train
from torchemo.training.phases import Phases
from torchemo.training.step import outer_step
from torchemo.training.trainer import Trainer

SEEDED_AFTER = 4
"""Steps of the learner before its memory of offsets is seeded and trains alone."""


def trainer(case="maml", **options):
    made = Trainer(make_learner(case), **options)
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
    ours = trainer(config=OuterConfig(lr=0.01, clip=None, schedule="cosine"), phases=Phases(5))
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
    with pytest.raises(ConfigError, match="needs the length of the training"):
        trainer(config=OuterConfig(schedule="cosine"))


def test_training_with_an_unused_memory_equals_training_without_bit_for_bit():
    """Clipping is per group, and Adam is per tensor: an untrained gate does not disturb the learner."""
    plain = trainer(config=OuterConfig(clip=0.01))
    beside = trainer(
        config=OuterConfig(clip=0.01), memory=make_memory("sum", plain.learner, capacity=0)
    )
    for i in range(3):
        plain.step(make_episode(i))
        beside.step(make_episode(i))
    for name, p in plain.params.items():
        assert torch.equal(p, beside.params[name])


def seen(made):
    return {n: p.detach().clone() for n, p in made.params.items()}


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("case", [c for c in LEARNER_CASES if OFFSETS in fitting_memories(c)])
def test_a_frozen_learner_is_that_without_memory_bit_for_bit_and_slots_learn(case, schedule):
    """With the rates of a training that ends where the slots begin; then nothing of the learner moves."""
    memory = make_memory(OFFSETS, make_learner(case), filled=False, warmup=SEEDED_AFTER)
    config = OuterConfig(schedule=schedule)
    plain = trainer(case, config=config, phases=Phases(4))
    made = trainer(case, memory=memory, config=config, phases=Phases(4, 4))
    for i in range(4):
        assert len(memory.store) == 0
        assert not made.frozen
        plain.step(make_episode(i))
        made.step(make_episode(i))
    learned, factors = seen(made), []
    assert all(torch.equal(p, learned[n]) for n, p in seen(plain).items())
    slots = {n: v.clone() for n, v in memory.store.values.items()}
    for i in range(4, 8):
        assert made.frozen
        factors.append(made.rate_factor)
        made.step(make_episode(i))
    assert seen(made).keys() == learned.keys()
    assert all(torch.equal(p, learned[n]) for n, p in seen(made).items())
    assert slots
    assert any(not torch.equal(v, memory.store.values[n]) for n, v in slots.items())
    halves = [1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]  # cos of 0, 45, 90, 135 degrees
    assert factors == pytest.approx(halves if schedule == "cosine" else [1.0] * 4)


@pytest.mark.parametrize("part", ["memory_gradients", "values"])
def test_a_memory_that_diverges_is_refused_before_anything_changes(part, monkeypatch):
    made = trainer(memory=make_memory("gated", make_learner("maml")))
    before = {n: p.detach().clone() for n, p in made.params.items()}
    gates = [p.detach().clone() for p in made.memory.parameters()]

    def poisoned(*args, **options):
        found = outer_step(*args, **options)
        bad = {n: torch.full_like(t, torch.nan) for n, t in getattr(found, part).items()}
        assert bad
        return found._replace(**{part: bad})

    monkeypatch.setattr(train, "outer_step", poisoned)
    with pytest.raises(Diverged):
        made.step(make_episode())
    assert all(torch.equal(p, before[n]) for n, p in made.params.items())
    assert all(torch.equal(p, q) for p, q in zip(made.memory.parameters(), gates, strict=True))


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
    memory = make_memory("gated", make_learner("maml"), trained=False)
    made = trainer(memory=memory)
    gates = memory.aggregator.gate.detach().clone()
    generation = memory.store.ledger.generation.clone()
    report = made.step(make_episode())
    assert report.recall.m > 0
    assert (memory.store.ledger.generation - generation).sum() == 2
    assert not torch.equal(memory.aggregator.gate, gates)


def test_a_diverged_step_names_the_task_and_changes_nothing():
    memory = make_memory("sum", make_learner("maml"))
    made = trainer(memory=memory)
    episode = make_episode()
    bad = Episode(episode.support, episode.query, index=torch.tensor([7, 8]))
    made.params["head.bias"].data[0] = torch.nan
    before = copy.deepcopy((made.params, memory.state_dict()))
    with pytest.raises(Diverged, match="task 7"):
        made.step(bad)
    for name, p in made.params.items():
        assert torch.equal(p.nan_to_num(), before[0][name].nan_to_num())
    assert all(torch.equal(t, before[1][n]) for n, t in memory.state_dict().items())
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


def running_statistics(*, memory_steps=None):
    """Return a trainer whose network averages statistics, and a task for it."""
    shape = TaskShape("classification", (1, 16, 16), 2)
    model = Conv4(2, in_channels=1, image_size=16, filters=2, bn="per_step_running", bn_steps=3)
    learner = build_learner(Part("maml", {"steps": 2}), model, shape)
    g = torch.Generator().manual_seed(0)
    y = torch.arange(2).expand(2, 2).contiguous()
    batch = lambda: Batch(torch.rand(2, 2, 1, 16, 16, generator=g), y)  # noqa: E731
    memory = None
    if memory_steps is not None:
        options = OffsetOptions(capacity=2, steps=memory_steps, key=Part("statistics"))
        memory = OffsetMemory.build(options, host(learner), shape, train_steps=1)
    phases = Phases(1, memory_steps)
    return Trainer(learner, memory=memory, phases=phases), Episode(batch(), batch())


def test_a_frozen_learner_averages_no_statistics():
    made, episode = running_statistics(memory_steps=1)
    drawn = seen(made)
    made.step(episode)
    learned = seen(made)
    made.step(episode)
    names = made.learner.model.buffers
    assert all(not torch.equal(learned[n], drawn[n]) for n in names)
    assert all(torch.equal(p, learned[n]) for n, p in seen(made).items())


def test_running_statistics_are_averaged_and_used_in_evaluation():
    made, episode = running_statistics()
    model = made.learner.model
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


def with_offsets():
    """Return a learner of points, and a memory of offsets whose keys can learn to recognise their task."""
    shape = TaskShape("regression", (1,), 1, n_shot=5)
    learner = build_learner(Part("maml", {"steps": 1, "inner_lr": 0.01}), MLP(1), shape)
    size = {"embedder": "pairs", "layers": 1, "dim": 8, "heads": 2, "ff": 8}
    key = Part("transformer", {**size, "training": "self_recognition"})
    options = OffsetOptions(capacity=3, warmup=2, key=key)
    return learner, OffsetMemory.build(options, host(learner), shape)


def test_keys_that_recognise_themselves_are_left_out_of_the_outer_optimizer():
    learner, memory = with_offsets()
    recognition = SelfRecognition(memory.encoder, lr=1e-2, every=1)
    made = Trainer(learner, memory=memory, recognition=recognition)
    assert any(n.startswith("encoder") for n, _ in memory.named_parameters())
    assert not any(n.startswith("encoder") for n in made.memory_learned)
    g = torch.Generator().manual_seed(0)
    batch = lambda: Batch(*torch.randn(2, 4, 5, 1, generator=g))  # noqa: E731
    weights = [p.detach().clone() for p in memory.encoder.parameters()]
    reports = [made.step(Episode(batch(), batch())) for _ in range(3)]
    assert all(r.recognition_loss > 0 for r in reports)
    assert any(
        not torch.equal(a, b) for a, b in zip(weights, memory.encoder.parameters(), strict=True)
    )
    assert len(memory.store) == 3
    assert recognition.lr == pytest.approx(2e-3)  # slowed down once the slots were seeded


def recognising(steps, *, every=1):
    learner, memory = with_offsets()
    return Trainer(
        learner,
        memory=memory,
        recognition=SelfRecognition(memory.encoder, lr=1e-2, every=every),
        config=OuterConfig(schedule="cosine"),
        phases=Phases(steps),
    )


def test_after_the_start_up_keys_are_trained_at_every_so_many_steps_and_see_all_support_sets():
    made, g = recognising(100, every=3), torch.Generator().manual_seed(0)
    batch = lambda: Batch(*torch.randn(2, 4, 5, 1, generator=g))  # noqa: E731
    trained = [made.step(Episode(batch(), batch())).recognition_loss is not None for _ in range(8)]
    assert trained == [True, True, False, True, False, False, True, False]  # warmup = 2
    assert int(made.recognition.state_dict()["pushed"]) == 8 * 4
    assert made.recognition.lr == pytest.approx(
        6e-3
    )  # a fifth of the pace: three fifths of the rate


def test_once_the_schedule_has_ended_nothing_learned_moves_any_more():
    made, g = recognising(4), torch.Generator().manual_seed(0)
    batch = lambda: Batch(*torch.randn(2, 4, 5, 1, generator=g))  # noqa: E731

    def content():
        slots = {"keys": made.memory.store.keys, **made.memory.store.values}
        learned = {**made.params, **dict(made.memory.named_parameters()), **slots}
        return {n: t.detach().clone() for n, t in learned.items()}

    for _ in range(4):
        made.step(Episode(batch(), batch()))
    before = content()
    made.step(Episode(batch(), batch()))
    after = content()
    assert any(v.any() for n, v in before.items() if n in made.memory.store.values)
    for name, value in before.items():
        # Slot keys are put back on the unit sphere: up to rounding.
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"clip": -1.0}])
def test_impossible_outer_choices_are_refused(wrong):
    with pytest.raises(ConfigError):
        OuterConfig(**wrong)


@pytest.mark.parametrize("memory_case", [None, "gated", OFFSETS])
def test_a_state_is_a_copy_that_later_steps_leave_alone(memory_case):
    learner = make_learner("maml")
    memory = None if memory_case is None else make_memory(memory_case, learner)
    made = trainer(memory=memory)
    made.step(make_episode())
    slots = {} if memory is None else {**memory.store.values, **memory.store.moments}
    state = {} if memory is None else memory.state_dict()  # values in it are copies already
    live = {t.data_ptr() for ts in (made.params, state, slots) for t in ts.values()}
    copied = made.state_dict()
    copies = [t for group in copied.values() for t in group.values()]
    assert not live & {t.data_ptr() for t in copies if t.numel()}
    assert not any(t.requires_grad for t in copies)
    kept = copy.deepcopy(copied)
    for i in range(3):
        made.step(make_episode(20 + i))
    for group, tensors in kept.items():
        assert all(torch.equal(t, copied[group][n]) for n, t in tensors.items()), group
    now = made.state_dict()
    moved = {
        g for g, tensors in kept.items() for n in tensors if not torch.equal(tensors[n], now[g][n])
    }
    assert moved == copied.keys()


def resumed():
    for case in ("maml", "meta-sgd", "reptile", "tsa-maml/groups", "protonet"):
        for memory_case in (None, "gated", OFFSETS):
            if memory_case is None or memory_case in fitting_memories(case):
                yield case, memory_case


@pytest.mark.parametrize(("case", "memory_case"), list(resumed()))
def test_a_restored_trainer_continues_bit_for_bit_and_shares_nothing_with_the_state(
    case, memory_case
):
    def made():
        memory = None
        if memory_case is not None:
            memory = make_memory(memory_case, make_learner(case))
        return trainer(case, memory=memory, config=OuterConfig(schedule="cosine"), phases=Phases(9))

    whole = made()
    for i in range(3):
        whole.step(make_episode(i))
    saved = whole.state_dict()
    kept = copy.deepcopy(saved)
    other = made()
    other.load_state_dict(saved)
    assert other.iteration == 3
    for i in range(3, 6):
        whole.step(make_episode(i))
        other.step(make_episode(i))
    ours, theirs = whole.state_dict(), other.state_dict()
    for group, tensors in ours.items():
        assert tensors.keys() == theirs[group].keys()
        assert all(torch.equal(t, theirs[group][n]) for n, t in tensors.items()), group
    for group, tensors in kept.items():
        assert all(torch.equal(t, saved[group][n]) for n, t in tensors.items()), group


def test_the_memory_is_told_the_gradient_of_its_slot_keys_and_the_rate_of_the_step(monkeypatch):
    memory = make_memory(OFFSETS, make_learner("maml"))
    made = trainer(memory=memory, config=OuterConfig(schedule="cosine"), phases=Phases(4))
    seen, real = [], memory.remember
    monkeypatch.setattr(memory, "remember", lambda *a, **k: (seen.append(k), real(*a, **k))[1])
    keys = memory.store.keys.clone()
    expected = outer_step(made.learner, made.params, make_episode(), memory=memory)
    made.step(make_episode())
    made.step(make_episode(1))
    assert torch.equal(seen[0]["slot_key_gradient"], expected.slot_key_gradient)
    assert [k["rate_factor"] for k in seen] == pytest.approx([1.0, 0.5 + 0.5**1.5])
    assert not torch.equal(memory.store.keys, keys)


def test_a_skipped_step_changes_nothing_but_the_count():
    made = trainer(memory=make_memory("gated", make_learner("maml")))
    before = made.state_dict()
    made.skip()
    after = made.state_dict()
    assert int(after.pop("progress")["iteration"]) == 1
    assert all(torch.equal(t, before[g][n]) for g, group in after.items() for n, t in group.items())


def test_a_trainer_says_what_it_trains():
    assert repr(trainer()) == "Trainer(MAML, 0 outer steps)"
    made = trainer(memory=make_memory(OFFSETS, make_learner("maml")))
    made.step(make_episode())
    assert repr(made) == "Trainer(MAML + offsets, 1 outer steps)"
