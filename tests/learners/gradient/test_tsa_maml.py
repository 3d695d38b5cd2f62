"""TSA-MAML: stages, groups, and one resumable run."""

from dataclasses import replace

import pytest
import torch

from tests.learners.gradient.problems import LINE, POINTS, point_episode
from tests.runs.small import config, final_state, log, stop_after
from torchemo.config.registry import Part
from torchemo.config.run import OuterConfig
from torchemo.core.errors import ConfigError
from torchemo.core.losses import mean_squared_error
from torchemo.core.tree import select
from torchemo.core.types import Batch
from torchemo.data.synthetic.regression import RegressionSpec, sample_regression
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.learners.gradient.tsa_maml import (
    CENTRES,
    COLLECTED,
    COUNT,
    PENDING,
    SOLUTIONS,
    TSAMAML,
)
from torchemo.learners.learner import network_names
from torchemo.models import Conv4
from torchemo.runs.train import train_run
from torchemo.training.predict import predict
from torchemo.training.trainer import Trainer

SPEC = RegressionSpec("arml6", n_shot=6, n_query=4)


def tasks(number, count=2):
    return sample_regression(SPEC, 0, split="train", start=number * count, count=count)


def trainer(**switches):
    chosen = {"groups": 2, "first_stage": 2, "cluster_tasks": 6, **switches}
    part = Part("tsa-maml", {"inner_lr": 0.02, "steps": 2, **chosen})
    return Trainer(build_learner(part, LINE, POINTS), config=OuterConfig(lr=1e-2))


def train(made, steps, *, first=0):
    for i in range(first, first + steps):
        made.step(tasks(i))
    return made


def snapshot(made):
    return {n: p.detach().clone() for n, p in made.params.items()}


def test_stages_follow_each_other_and_only_learn_what_is_theirs():
    made = trainer()
    begun = snapshot(made)
    first = snapshot(train(made, 2))
    moved = {n for n in begun if not torch.equal(begun[n], first[n])}
    assert moved == set(network_names(begun))  # stage 1 is MAML
    assert SOLUTIONS in made.params
    collecting = snapshot(train(made, 2, first=2))
    assert int(collecting[COLLECTED]) == 4
    assert all(torch.equal(collecting[n], first[n]) for n in begun)  # nothing is learned meanwhile
    clustered = snapshot(train(made, 1, first=4))
    assert SOLUTIONS not in clustered
    assert clustered[CENTRES].shape[0] == 2
    train(made, 8, first=5)
    ended = snapshot(made)
    assert all(torch.equal(ended[n], first[n]) for n in network_names(begun))  # frozen
    groups = [n for n in begun if n.startswith("group/")]
    assert any(not torch.equal(ended[n], clustered[n]) for n in groups)


def test_stage_one_is_maml_bit_for_bit():
    made = trainer(first_stage=5)
    maml = Trainer(MAML(made.learner.loop), config=OuterConfig(lr=1e-2))
    reports = [[t.step(tasks(i)).losses for i in range(4)] for t in (made, maml)]
    for ours, theirs in zip(*reports, strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(made.params[n], p) for n, p in maml.params.items())


def test_one_group_continues_as_maml_from_the_mean_solution():
    made = trainer(groups=1, cluster_tasks=4)
    train(made, 2)
    learner = made.learner
    expected = torch.cat([learner.solutions(made.params, tasks(i).support) for i in (2, 3)]).mean(0)
    train(made, 2, first=2)
    maml = Trainer(MAML(learner.loop), config=OuterConfig(lr=1e-2))
    parts = expected.split([p.numel() for p in maml.params.values()])
    for (name, p), part in zip(maml.params.items(), parts, strict=True):
        assert torch.equal(made.params[f"group/0/{name}"], part.view(p.shape))
        p.data.copy_(part.view(p.shape))
    for i in range(4, 8):
        assert torch.equal(made.step(tasks(i)).losses, maml.step(tasks(i)).losses)
    for name, p in maml.params.items():
        assert torch.equal(made.params[f"group/0/{name}"], p)


def grouped():
    made = train(trainer(cluster_tasks=12), 8)
    assert CENTRES in made.params
    return made


def test_groups_are_means_of_their_members_and_tasks_join_the_nearest():
    made = train(trainer(cluster_tasks=12), 7)
    solutions = made.params[SOLUTIONS].clone()
    solutions[10:] = made.learner.solutions(made.params, tasks(7).support)
    train(made, 1, first=7)
    params = made.params
    names = network_names(params)
    body = sum(params[n].numel() for n in names if n not in LINE.head)
    assert params[CENTRES].shape == (2, body)
    gaps = [[float((z[:body] - c).norm()) for c in params[CENTRES]] for z in solutions]
    member = torch.tensor([gap.index(min(gap)) for gap in gaps])
    assert member.unique().tolist() == [0, 1]
    for m in range(2):
        mean = solutions[member == m].mean(0)
        start = torch.cat([params[f"group/{m}/{n}"].flatten() for n in names])
        torch.testing.assert_close(start, mean, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mean[:body], params[CENTRES][m], rtol=1e-4, atol=1e-6)
    again = made.learner.assign(params, made.learner.solutions(params, tasks(3).support))
    assert torch.equal(again, made.learner.assign(params, solutions[2:4]))


def test_a_task_starts_from_its_group_and_answers_from_there():
    made = grouped()
    learner, episode = made.learner, tasks(20, 6)
    params = {n: p.detach() for n, p in made.params.items()}
    group = learner.assign(params, learner.solutions(params, episode.support))
    assert group.unique().numel() == 2
    names = network_names(params)
    base = {n: params[n].expand(6, *params[n].shape) for n in names}
    start = learner.start(params, episode.support, base=base)
    assert torch.equal(start.about["group"], group)
    for b, m in enumerate(group.tolist()):
        assert all(torch.equal(start.theta[n][b], params[f"group/{m}/{n}"]) for n in names)
    out = predict(learner, params, episode, batched=True).outputs[0]
    torch.testing.assert_close(out, LINE(start.theta, episode.query.x))


def test_a_group_steps_once_it_has_collected_a_whole_batch():
    made = grouped()
    learner = made.learner
    params = {n: p.detach() for n, p in made.params.items()}
    gradients = {
        n: torch.full_like(p, 2.0) for n, p in params.items() if not n.startswith("state/")
    }
    advance = lambda group: learner.advance(  # noqa: E731
        params, gradients, about={"group": torch.tensor(group)}, iteration=9
    )
    params = {n: p for n, p in params.items() if not n.startswith(PENDING)}
    params[COUNT] = torch.zeros(2, dtype=torch.int64)
    both = advance([0, 1])
    assert both.gradients == {}
    assert both.state[COUNT].tolist() == [1, 1]
    params = {**select(params, [n for n in params if not n.startswith("state/")]), **both.state}
    second = advance([1, 1])  # three tasks by now: one of the first batch, two of this
    assert second.state[COUNT].tolist() == [1, 0]
    assert {n.split("/")[1] for n in second.gradients} == {"1"}
    for value in second.gradients.values():
        assert torch.equal(value, torch.full_like(value, (2.0 * 2 + 2.0 * 2) / 3))
    assert any(n.startswith(PENDING + "group/0/") for n in second.state)
    assert not any(n.startswith(PENDING + "group/1/") for n in second.state)


def test_a_restored_trainer_collects_without_writing_into_the_saved_state():
    made = train(trainer(), 3)
    saved = made.state_dict()
    assert int(saved["params"][COLLECTED]) == 2
    kept = saved["params"][SOLUTIONS].clone()
    other = trainer()
    other.load_state_dict(saved)
    train(other, 1, first=3)
    assert int(other.params[COLLECTED]) == 4
    assert torch.equal(saved["params"][SOLUTIONS], kept)
    train(made, 1, first=3)
    assert torch.equal(made.params[SOLUTIONS], other.params[SOLUTIONS])


def test_all_tensors_can_be_compared_instead_of_the_body():
    made = train(trainer(cluster_on="all"), 5)
    assert made.params[CENTRES].shape[1] == sum(
        made.params[n].numel() for n in network_names(made.params)
    )


def test_equal_solutions_leave_groups_empty_and_change_nothing_else():
    loop = InnerLoop(LINE, steps=0, loss=mean_squared_error)
    learner = TSAMAML(loop, groups=3, first_stage=0, cluster_tasks=4)
    made = Trainer(learner)
    train(made, 2)
    before = snapshot(made)
    made.step(point_episode_float())
    group = learner.assign(
        made.params, learner.solutions(made.params, point_episode_float().support)
    )
    assert group.unique().numel() == 1
    empty = [m for m in range(3) if m != int(group[0])]
    for m in empty:
        for name in network_names(before):
            assert torch.equal(before[f"group/{m}/{name}"], made.params[f"group/{m}/{name}"])


def point_episode_float():
    episode = point_episode(2)
    part = lambda batch: Batch(batch.x.float(), batch.y.float())  # noqa: E731
    return replace(episode, support=part(episode.support), query=part(episode.query))


@pytest.mark.parametrize("scope", ["shared", "group"])
def test_a_run_interrupted_in_every_stage_ends_bit_for_bit_like_a_whole_one(scope, tmp_path):
    chosen = config("tsa-maml")
    stages = {"groups": 2, "first_stage": 3, "cluster_tasks": 4}
    memory = chosen.memory.set(scope=scope)
    chosen = replace(chosen, learner=chosen.learner.set(**stages), memory=memory)
    train_run(tmp_path / "whole", chosen)
    parts = tmp_path / "parts"
    # Stops: within stage 1, at its end, within the collection, after it, and within stage 2.
    assert train_run(parts, chosen, should_stop=stop_after(2)).ended == "stopped"
    for more in (1, 1, 1, 2):
        assert train_run(parts, should_stop=stop_after(more)).ended == "stopped"
    assert train_run(parts).ended == "finished"
    whole, resumed = final_state(tmp_path / "whole"), final_state(parts)
    assert CENTRES in whole.groups["params"]
    assert whole.info == resumed.info
    for group, tensors in whole.groups.items():
        assert tensors.keys() == resumed.groups[group].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, resumed.groups[group][name]), (group, name)
    assert log(tmp_path / "whole") == log(parts)


def test_bad_switches_are_refused():
    for wrong in ({"groups": 0}, {"first_stage": -1}, {"cluster_tasks": 1}):
        with pytest.raises(ConfigError, match="TSA-MAML"):
            trainer(**wrong)
    with pytest.raises(ConfigError, match="running statistics"):
        TSAMAML(InnerLoop(Conv4(3, image_size=16, filters=2, bn="running")))
