"""The outer loop: Adam on what is learned, `remember` on what is remembered (Eq. 3, Algorithm 1)."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.config.run import OuterConfig
from torchemo.core.errors import ConfigError, Diverged
from torchemo.core.rng import generator_for
from torchemo.core.tree import detach, is_finite
from torchemo.core.types import Episode, Params, Recall
from torchemo.learners.learner import STATE, Advance, Learner, Scheduled, Staged, learned, within
from torchemo.memory.build import RATE
from torchemo.memory.inspection.recalls import RecallStatistics, recall_statistics
from torchemo.memory.interface import TaskMemory
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.training.phases import Phases
from torchemo.training.step import OuterStep, outer_step
from torchemo.training.system import OLD_GROUP, System, method_title, restore_memory


class StepReport(NamedTuple):
    """What one outer step did.

    Attributes:
        iteration: Which step it was, from 0.
        losses: Outer losses of its tasks.
        gradient_norm: Norm of the learner's meta-gradient before clipping.
        recall: What was recalled.
        recognition_loss: Loss of the key network's own training, if there is one.
        statistics: What the recall was worth.
    """

    iteration: int
    losses: Float[Tensor, " task"]
    gradient_norm: float
    recall: Recall | None
    recognition_loss: float | None
    statistics: RecallStatistics | None


@final
class Trainer:
    """Meta-training as a sequence of steps; the caller brings the tasks.

    Args:
        learner: The learner.
        memory: The memory, or None for the base learner.
        config: The outer loop's choices.
        recognition: Training of the key network by self-recognition.
        seed: Seed of the initialisation.
        phases: Who trains when; by default learner and memory together, for no fixed number of steps.
        batched: Run the tasks of a step in one call; None: see `torchemo.training.predict.runs_together`.
        workers: Threads that share the tasks of a step otherwise.

    Example:
        >>> from torchemo.core.types import Batch
        >>> from torchemo.learners.gradient.loop import InnerLoop
        >>> from torchemo.learners.gradient.maml import MAML
        >>> from torchemo.models import MLP
        >>> x = torch.rand(2, 10, 1)  # two regression tasks of ten points
        >>> episode = Episode(Batch(x, x.sin()), Batch(x, x.sin()))
        >>> from torchemo.core.losses import task_loss
        >>> trainer = Trainer(MAML(InnerLoop(MLP(), loss=task_loss)))
        >>> trainer.step(episode).losses.shape, trainer.iteration
        (torch.Size([2]), 1)
    """

    def __init__(
        self,
        learner: Learner,
        *,
        memory: TaskMemory | None = None,
        config: OuterConfig | None = None,
        recognition: SelfRecognition | None = None,
        seed: int = 0,
        phases: Phases | None = None,
        batched: bool | None = None,
        workers: int = 1,
    ) -> None:
        self.learner = learner
        self.memory = memory
        self.config = OuterConfig() if config is None else config
        self.recognition = recognition
        self.phases = Phases() if phases is None else phases
        self._check_phases()
        self.batched = batched
        self.workers = workers
        self.iteration = 0
        drawn = learner.init(generator_for(seed, "learner"))
        self.params: Params = {
            n: p if n.startswith(STATE) else p.requires_grad_() for n, p in drawn.items()
        }
        self.learned = learned(learner, self.params)
        self.memory_learned = self._memory_learned()
        kind = torch.optim.Adam if self.config.optimizer == "adam" else torch.optim.SGD
        self.optimizer: torch.optim.Optimizer = kind(self._groups(), lr=self.config.lr)

    def __repr__(self) -> str:
        return f"Trainer({method_title(self.learner, self.memory)}, {self.iteration} outer steps)"

    def _groups(self) -> list[dict[str, Any]]:
        """Put learned inner rates in a group of their own if they have an outer rate of their own."""
        own = self.config.rates_lr
        rates = {n: p for n, p in self.learned.items() if own is not None and n.startswith(RATE)}
        others = [p for n, p in self.learned.items() if n not in rates]
        sets = [(others, self.config.lr), (list(rates.values()), own)]
        sets.append((list(self.memory_learned.values()), self.config.lr))
        return [{"params": ps, "lr": lr, "initial_lr": lr} for ps, lr in sets if ps]

    def _check_phases(self) -> None:
        if self.config.schedule != "constant" and self.phases.total is None:
            raise ConfigError(
                f"outer.schedule '{self.config.schedule}' needs the length of the training.",
                hint="Give Trainer(phases=Phases(steps)), or use schedule 'constant'.",
            )

    def _memory_learned(self) -> dict[str, Tensor]:
        if self.memory is None:
            return {}
        # Keys that learn to recognise their own task have an optimizer of their own.
        keys = "encoder." if self.recognition is not None else None
        return {
            n: p
            for n, p in self.memory.named_parameters()
            if p.requires_grad and not (keys and n.startswith(keys))
        }

    @property
    def frozen(self) -> bool:
        """Whether the learner is frozen and the memory trains alone."""
        return self.phases.frozen(self.iteration)

    @property
    def rate_factor(self) -> float:
        """Share of the outer rates in the present step."""
        return self.phases.rate_factor(self.iteration, self.config.schedule)

    def step(self, episode: Episode) -> StepReport:
        """Take one outer step on B tasks: adapt, learn, remember.

        Raises:
            Diverged: A loss or gradient is not finite; nothing has been changed.
        """
        learner = self.learner
        if isinstance(learner, Scheduled):
            learner = learner.scheduled(self.iteration)
        result = outer_step(
            learner,
            self.params,
            episode,
            memory=self.memory,
            batched=self.batched,
            workers=self.workers,
        )
        self._refuse_divergence(result, episode)
        norm = self._learn(learner, result)
        recognition_loss = self._train_keys(episode)
        statistics = self._remember(result, episode)
        report = StepReport(
            self.iteration, result.losses, norm, result.recall, recognition_loss, statistics
        )
        self.iteration += 1
        return report

    @property
    def system(self) -> System:
        """What answers at the present step; it shares the trainer's tensors."""
        return System(
            self.learner, self.params, self.memory, self.iteration, self.batched, self.workers
        )

    def skip(self) -> None:
        """Leave out a step whose tasks could not be used."""
        self.iteration += 1

    def state_dict(self) -> dict[str, Params]:
        """Copy everything that a resumed run needs, as groups of named tensors."""
        groups: dict[str, Params] = {
            "params": self.params,
            "optimizer": _optimizer_state(self.optimizer),
            "progress": {"iteration": torch.tensor(self.iteration)},
        }
        if self.memory is not None:
            groups["memory"] = self.memory.state_dict()
        if self.recognition is not None:
            groups["recognition"] = self.recognition.state_dict()
        return {
            group: {n: t.detach().clone() for n, t in tensors.items()}
            for group, tensors in groups.items()
        }

    def load_state_dict(self, groups: Mapping[str, Params]) -> None:
        """Take over a state that `state_dict` returned.

        Raises:
            CheckpointError: The state belongs to another learner or memory.
        """
        saved = restore_memory(self.params, self.memory, groups)
        for name in (n for n in saved if not n.startswith(STATE)):
            self.params[name].data.copy_(saved[name])
        self._keep({n: p.clone() for n, p in saved.items() if n.startswith(STATE)})
        self.iteration = int(groups["progress"]["iteration"])
        if self.recognition is not None:
            self.recognition.load_state_dict(groups["recognition"])
        # Plain SGD has no state, and checkpoints leave empty groups out.
        _restore_optimizer(self.optimizer, groups.get("optimizer", {}), gone=self._gone(groups))

    def _gone(self, groups: Mapping[str, Params]) -> range:
        """Return which numbers of a saved optimizer belong to parameters that are gone.

        Earlier versions gave a memory of offsets an aggregator too, which no step used.
        """
        if self.memory is None or self.memory.aggregator is not None:
            return range(0)
        unused = sum(name.startswith("aggregator.") for name in groups.get(OLD_GROUP, {}))
        first = len(self.learned) + sum(not n.startswith("encoder.") for n in self.memory_learned)
        return range(first, first + unused)

    def _learn(self, learner: Learner, result: OuterStep) -> float:
        """Take the optimizer's step, and what the network and a staged learner change besides."""
        gradients, advance = {} if self.frozen else result.gradients, None
        if isinstance(learner, Staged) and not self.frozen:
            advance = learner.advance(
                self.params, gradients, about=result.about, iteration=self.iteration
            )
            gradients = advance.gradients
        norm = self._descend(self.learned, gradients)
        # A norm overflows before its gradient does, and is then clipped to nothing.
        if not math.isfinite(norm) and not all(
            bool(g.isfinite().all()) for g in gradients.values()
        ):
            raise _diverged(self.iteration, "the learner has a non-finite gradient")
        self._descend(self.memory_learned, result.memory_gradients)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.rate_factor
        self.optimizer.step()
        buffers = {} if self.frozen else result.buffers
        for name, buffer in buffers.items():
            self.params[name].data.copy_(buffer)
        if advance is not None:
            self._advance(advance)
        return norm

    def _advance(self, advance: Advance) -> None:
        for name, tensor in advance.resets.items():
            self.params[name].data.copy_(tensor)
        self._keep(advance.state)

    def _keep(self, state: Params) -> None:
        """Hold what a staged learner keeps from one step to the next."""
        for name in [n for n in self.params if n.startswith(STATE)]:
            del self.params[name]
        self.params.update(detach(state))

    def _remember(self, result: OuterStep, episode: Episode) -> RecallStatistics | None:
        """Write what the step leaves behind, and return what its recall was worth."""
        memory, recall, values = self.memory, result.recall, result.values
        if memory is None or recall is None:
            return None
        statistics = recall_statistics(memory.store, recall, values, domain=episode.domain)
        memory.remember(
            recall,
            values,
            params=self.params,
            rate_factor=self.rate_factor,
            slot_key_gradient=result.slot_key_gradient,
        )
        if self.recognition is not None and memory.seeded_at == int(memory.store.ledger.iteration):
            self.recognition.settle()
        return statistics

    def _train_keys(self, episode: Episode) -> float | None:
        """Train the keys, if it is their turn: at every step of the start-up, and less often later on."""
        if self.recognition is None or self.memory is None:
            return None
        if self.iteration >= self.memory.startup and self.iteration % self.recognition.every:
            self.recognition.push(episode.support)
            return None
        return self.recognition.step(episode, self.params, rate_factor=self.rate_factor)

    def _descend(self, tensors: dict[str, Tensor], gradients: Params) -> float:
        """Hand a group's gradient to the optimizer, clipped by the group's own norm."""
        for name, tensor in tensors.items():
            tensor.grad = gradients[name].clone() if name in gradients else None
        if not tensors or self.config.clip is None:
            return float(_norm(gradients))
        return float(torch.nn.utils.clip_grad_norm_(list(tensors.values()), self.config.clip))

    def _refuse_divergence(self, result: OuterStep, episode: Episode) -> None:
        finite = result.losses.isfinite() & is_finite(
            {**result.rows, **within("value/", result.values)}
        )
        if bool(finite.all()):
            if not all(bool(g.isfinite().all()) for g in result.memory_gradients.values()):
                raise _diverged(self.iteration, "the memory has a non-finite gradient")
            return
        bad = int((~finite).nonzero()[0])
        name = bad if episode.index is None else int(episode.index[bad])
        raise _diverged(self.iteration, f"task {name} has a non-finite loss or gradient")


def _diverged(iteration: int, what: str) -> Diverged:
    return Diverged(
        f"outer step {iteration}: {what}.",
        hint="Lower the inner or the outer rate; nothing was changed by this step.",
    )


def _norm(gradients: Params) -> Tensor:
    if not gradients:
        return torch.zeros(())
    return torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Params:
    """Flatten an optimizer's per-parameter tensors: ``{"3.exp_avg": ...}``."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": tensor.detach()
        for number, parts in state.items()
        for name, tensor in parts.items()
        if isinstance(tensor, Tensor)
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Params, *, gone: range) -> None:
    state: dict[int, Params] = {}
    for key, tensor in saved.items():
        text, name = key.split(".", 1)
        number = int(text)
        if number in gone:
            continue
        # Numbers follow the order of the parameters, so those after the gap close it.
        now = number if number < gone.start else number - len(gone)
        state.setdefault(now, {})[name] = tensor.clone()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
