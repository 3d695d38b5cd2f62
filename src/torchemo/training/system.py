"""What answers: a learner, its parameters and its memory, without anything that trains them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from torchemo.core.errors import CheckpointError
from torchemo.core.rng import generator_for
from torchemo.core.types import Episode, Params, Statistics
from torchemo.learners.learner import STATE, Learner
from torchemo.memory.interface import TaskMemory, current_names
from torchemo.training.device import CPU
from torchemo.training.distributed import ALONE, Team
from torchemo.training.evaluate import Scores, evaluate
from torchemo.training.predict import Prediction, predict

OLD_GROUP = "emo"
"""How the state of a memory was named in checkpoints before it was called memory."""


@final
@dataclass(frozen=True)
class System:
    """A trained learner with its memory.

    Attributes:
        learner: The learner.
        params: Its meta-parameters.
        memory: Its memory; None for the base learner.
        iteration: Outer steps of meta-training behind it.
        batched: Run the tasks of a batch in one call; None: see `torchemo.training.predict.runs_together`.
        workers: Threads that share the tasks of a batch otherwise.
        team: Processes that share what is evaluated.
    """

    learner: Learner
    params: Params
    memory: TaskMemory | None = None
    iteration: int = 0
    batched: bool | None = None
    workers: int = 1
    team: Team = ALONE

    @property
    def title(self) -> str:
        """The learner and how it remembers."""
        return method_title(self.learner, self.memory)

    def predict(
        self,
        episode: Episode,
        *,
        steps: int | None = None,
        every_step: bool = True,
        statistics: Statistics = "inductive",
    ) -> Prediction:
        """Adapt to support sets and answer queries; see `torchemo.training.predict.predict`."""
        how = {**self._how, "steps": steps, "every_step": every_step, "statistics": statistics}
        return predict(self.learner, self.params, episode, **how)

    def evaluate(
        self,
        episodes: Iterable[Episode],
        *,
        steps: int | None = None,
        every_step: bool = True,
        statistics: Statistics = "inductive",
    ) -> Scores:
        """Score fixed tasks; see `torchemo.training.evaluate.evaluate`."""
        how = {**self._how, "steps": steps, "every_step": every_step, "statistics": statistics}
        return evaluate(self.learner, self.params, episodes, team=self.team, **how)

    @property
    def _how(self) -> dict[str, Any]:
        return {"memory": self.memory, "batched": self.batched, "workers": self.workers}


def restored(
    learner: Learner,
    memory: TaskMemory | None,
    groups: Mapping[str, Params],
    *,
    batched: bool | None = None,
    workers: int = 1,
    device: torch.device = CPU,
    team: Team = ALONE,
) -> System:
    """Make a system from the state that `torchemo.training.trainer.Trainer.state_dict` returned."""
    memory = None if memory is None else memory.to(device)
    if memory is not None:
        memory.store.owner = None  # what only answers keeps no versions of its values
    expected = learner.init(generator_for(0, "learner"))
    saved = restore_memory(expected, memory, groups)
    params = {n: p.detach().to(device) for n, p in saved.items()}
    iteration = int(groups["progress"]["iteration"])
    if memory is not None:
        memory.eval()
    return System(learner, params, memory, iteration, batched, workers, team)


def restore_memory(
    expected: Params, memory: TaskMemory | None, groups: Mapping[str, Params]
) -> Params:
    """Check a saved state, give the memory its part of it, and return the saved parameters."""
    saved = groups.get("params", {})
    remembered = groups.get("memory", groups.get(OLD_GROUP))
    known = {n: f"shape {list(p.shape)}" for n, p in expected.items() if not n.startswith(STATE)}
    got = {n: f"shape {list(p.shape)}" for n, p in saved.items() if not n.startswith(STATE)}
    known |= {} if memory is None else {"memory": "shape of slots"}
    got |= {} if remembered is None else {"memory": "shape of slots"}
    differ = sorted(n for n in known.keys() | got.keys() if known.get(n) != got.get(n))
    if differ:
        name = differ[0]
        raise CheckpointError(
            f"the saved state has {got.get(name, 'nothing')} for {name!r:.80},"
            f" this run has {known.get(name, 'nothing')}.",
            hint="Open it with the configuration the run was started with.",
        )
    if memory is not None and remembered is not None:
        memory.load_state_dict(current_names(remembered))
    return saved


def memory_state(groups: Mapping[str, Params]) -> Params:
    """Return the saved state of a memory under the names of today; empty without one."""
    return current_names(groups.get("memory", groups.get(OLD_GROUP, {})))


def method_title(learner: Learner, memory: TaskMemory | None) -> str:
    """Name the learner and how it remembers: "MAML", "MAML + EMO", "MAML + offsets"."""
    return learner.title if memory is None else f"{learner.title} + {memory.title}"
