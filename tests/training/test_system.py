"""Systems: what answers, alone, as a trainer hands it out, and from a saved state."""

import pytest
import torch

from tests.laws.cases import LEARNER_CASES, OFFSETS, make_episode, make_learner, make_memory
from torchemo.core.errors import CheckpointError
from torchemo.memory.interface import OLD_NAMES
from torchemo.training.evaluate import evaluate
from torchemo.training.predict import predict
from torchemo.training.system import System, restored
from torchemo.training.trainer import Trainer


def trained(case="maml", memory_case=None, steps=2):
    learner = make_learner(case)
    memory = None if memory_case is None else make_memory(memory_case, learner)
    made = Trainer(learner, memory=memory)
    for p in made.params.values():
        p.data = p.data.double() if p.is_floating_point() else p.data
    for i in range(steps):
        made.step(make_episode(i))
    return made


def old_names(groups):
    """Give a state the names of an earlier version."""
    now = {new: old for old, new in OLD_NAMES.items()}
    renamed = {}
    for name, tensor in groups["memory"].items():
        new = next((n for n in now if name.startswith(n)), None)
        renamed[name if new is None else now[new] + name.removeprefix(new)] = tensor
    return {**{n: g for n, g in groups.items() if n != "memory"}, "emo": renamed}


@pytest.mark.parametrize(
    ("case", "memory_case", "title"),
    [
        ("maml", None, "MAML"),
        ("maml", "gated", "MAML + EMO"),
        ("maml", OFFSETS, "MAML + offsets"),
        ("bmg/l2", None, "BMG over Meta-SGD"),
        ("protonet", OFFSETS, "ProtoNet + offsets"),
    ],
)
def test_a_system_is_named_after_its_learner_and_its_memory(case, memory_case, title):
    assert trained(case, memory_case, steps=0).system.title == title


@pytest.mark.parametrize("memory_case", [None, "sum", OFFSETS])
@pytest.mark.parametrize("batched", [None, False, True])
def test_it_answers_and_scores_as_the_functions_do(memory_case, batched):
    made = trained("maml", memory_case)
    memory, episode = made.memory, make_episode(9)
    if memory is not None:
        memory.eval()
    system = System(made.learner, made.params, memory, batched=batched)
    for more in ({}, {"steps": 3}, {"every_step": False}):
        ours = system.predict(episode, **more)
        theirs = predict(made.learner, made.params, episode, memory=memory, batched=batched, **more)
        assert all(torch.equal(a, b) for a, b in zip(ours.outputs, theirs.outputs, strict=True))
        assert (ours.recall is None) == (memory is None)
        scores = system.evaluate([episode], **more)
        expected = evaluate(
            made.learner, made.params, [episode], memory=memory, batched=batched, **more
        )
        assert torch.equal(scores.loss, expected.loss)


def test_a_trainer_hands_out_what_it_has_at_the_moment():
    made = trained("maml", "gated")
    system = made.system
    assert (system.iteration, system.memory) == (2, made.memory)
    before = system.predict(make_episode(9)).outputs[-1]
    made.step(make_episode(2))
    assert not torch.equal(system.predict(make_episode(9)).outputs[-1], before)
    assert made.system.iteration == 3


@pytest.mark.parametrize("named", ["today", "earlier"])
@pytest.mark.parametrize("memory_case", ["gated", OFFSETS])
@pytest.mark.parametrize("case", ["maml", "meta-sgd", "tsa-maml/groups"])
def test_a_system_from_a_saved_state_answers_bit_for_bit(case, memory_case, named):
    made = trained(case, memory_case, steps=3)
    groups = made.state_dict() if named == "today" else old_names(made.state_dict())
    memory = make_memory(memory_case, made.learner, filled=False, trained=False)
    system = restored(made.learner, memory, groups)
    assert system.iteration == 3
    assert not memory.training
    assert not any(p.requires_grad for p in system.params.values())
    made.memory.eval()
    ours, theirs = (one.predict(make_episode(9)).outputs for one in (system, made.system))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("case", LEARNER_CASES)
def test_every_learner_is_restored_without_a_memory(case):
    made = trained(case, steps=1)
    system = restored(made.learner, None, made.state_dict())
    ours, theirs = (one.predict(make_episode(9)).outputs for one in (system, made.system))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_state_of_another_learner_or_memory_is_refused():
    groups = trained("maml", "gated").state_dict()
    learner = make_learner("maml")
    with pytest.raises(CheckpointError, match="rate/"):
        restored(make_learner("meta-sgd"), make_memory("gated", learner), groups)
    with pytest.raises(CheckpointError, match="configuration the run was started with"):
        restored(learner, None, groups)
    with pytest.raises(CheckpointError, match="configuration the run was started with"):
        restored(learner, make_memory("gated", learner), trained("maml").state_dict())
