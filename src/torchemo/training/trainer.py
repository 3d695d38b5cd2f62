"""The outer loop: Adam on what is learned, `remember` on what is remembered (Eq. 3, Algorithm 1)."""

import math
from collections.abc import Mapping
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.config.run import DenseConfig, OuterConfig
from torchemo.core.checks import check_episode
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.tree import detach, tree_map
from torchemo.core.types import Batch, Episode, Params, Recall
from torchemo.learners.learner import (
    STATE,
    Advance,
    Learner,
    Scheduled,
    Staged,
    learned,
    moving,
)
from torchemo.memory.inspection.recalls import (
    Pending,
    RecallStatistics,
    fetched,
    pending_statistics,
)
from torchemo.memory.interface import TaskMemory
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.training.classes import for_training
from torchemo.training.dense.classify import (
    begin_with,
    classifier_of,
    dense_training,
    hand_over,
)
from torchemo.training.device import CPU, batch_to, to_device
from torchemo.training.distributed import ALONE, Team
from torchemo.training.optimizer import (
    make_optimizer,
    optimizer_state,
    outer_groups,
    restore_optimizer,
)
from torchemo.training.phases import Phases
from torchemo.training.predict import head_outputs
from torchemo.training.step import OuterStep, check_finite, diverged, outer_step
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
        dense: Classification of base classes before the episodes or beside them; None without any.
        base_classes: Number of base classes.
        train_way: Classes of a training task; as many as the learner has by default.
        device: Where everything is computed. Parameters are drawn on the CPU and moved; a memory is moved
            with them, but training of its keys must already be made with keys on the device.
        team: Processes that share the tasks of a step; each has a trainer of its own, with equal numbers.

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
        dense: DenseConfig | None = None,
        base_classes: int = 0,
        train_way: int | None = None,
        device: torch.device = CPU,
        team: Team = ALONE,
    ) -> None:
        self.learner = learner
        self.of_training = None if train_way is None else for_training(learner, train_way)
        self.memory = None if memory is None else memory.to(device)
        self.device = device
        self.config = OuterConfig() if config is None else config
        self.recognition = recognition
        self.phases = Phases() if phases is None else phases
        self._check_phases()
        self.batched = batched
        self.workers = workers
        self.team = team
        self.iteration = 0
        drawn = tree_map(lambda p: p.to(device), learner.init(generator_for(seed, "learner")))
        self.params: Params = {
            n: p if n.startswith(STATE) else p.requires_grad_() for n, p in drawn.items()
        }
        self.learned = learned(learner, self.params)
        self.memory_learned = self._memory_learned()
        self.optimizer = make_optimizer(
            outer_groups(self.learned, self.memory_learned, self.config), self.config
        )
        sizes = {"stage": self.phases.dense, "classes": base_classes, "seed": seed}
        self.dense = dense_training(learner.model, self.params, dense, **sizes)

    def __repr__(self) -> str:
        return f"Trainer({method_title(self.learner, self.memory)}, {self.iteration} outer steps)"

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
        return self.phases.share_of(self.config, self.iteration)

    @property
    def episodic(self) -> int:
        """Number of the present outer step among those on episodes, from 0."""
        return self.iteration - self.phases.dense

    def step(self, episode: Episode | None, *, images: Batch | None = None) -> StepReport:
        """Take one outer step on B tasks: adapt, learn, remember.

        Args:
            episode: The tasks; None is a step of dense classification alone.
            images: Images of base classes, to be classified first.

        Raises:
            Diverged: A loss or gradient is not finite; nothing has been changed.
        """
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise ConfigError(
                "a training step needs gradients, and they are switched off here.",
                hint="Leave torch.no_grad() or torch.inference_mode() before the step.",
            )
        if self.phases.dense and not self.episodic and self.dense is not None:
            hand_over(self.learner, self.params, self.dense.classifier)
        done = [] if images is None else [self._classify(images)]
        done += [] if episode is None else [self._on_tasks(episode)]
        self.iteration += 1
        return done[-1]

    def _on_tasks(self, episode: Episode) -> StepReport:
        learner, episode = self._ready(episode)
        result = outer_step(
            learner,
            self.params,
            episode,
            memory=self.memory,
            batched=self.batched,
            workers=self.workers,
            team=self.team,
        )
        norm = self._learn(learner, result, episode)
        recognition_loss = self._train_keys(episode)
        statistics = self._remember(result, episode)
        # Numbers for the log come last, in one wait for the device.
        pending = [] if statistics is None else [statistics]
        losses = [] if recognition_loss is None else [recognition_loss]
        found = iter(fetched(pending, *losses))
        known = next(found) if pending else None
        loss = next(found) if losses else None
        return StepReport(self.iteration, result.losses, norm, result.recall, loss, known)

    def _ready(self, episode: Episode) -> tuple[Learner, Episode]:
        """Return the learner as it is at this step, and the tasks where it computes."""
        if self.device.type != "cpu":
            check_episode(episode, n_way=head_outputs(self.learner, self.params))
        learner = self.learner if self.of_training is None else self.of_training
        if isinstance(learner, Scheduled):
            learner = learner.scheduled(self.episodic)
        return learner, to_device(episode, self.device)

    @property
    def system(self) -> System:
        """What answers at the present step; it shares the trainer's tensors."""
        how = (self.batched, self.workers, self.team)
        return System(self.learner, self.params, self.memory, self.iteration, *how)

    def skip(self) -> None:
        """Leave out a step whose tasks could not be used."""
        self.iteration += 1

    def state_dict(self) -> dict[str, Params]:
        """Copy everything that a resumed run needs, as groups of named tensors on the host."""
        groups: dict[str, Params] = {
            "params": self.params,
            "optimizer": optimizer_state(self.optimizer),
            "progress": {"iteration": torch.tensor(self.iteration, device="cpu")},
        }
        if self.memory is not None:
            groups["memory"] = self.memory.state_dict()
        if self.recognition is not None:
            groups["recognition"] = self.recognition.state_dict()
        if self.dense is not None:
            groups["dense"] = self.dense.state_dict()
        return {
            group: {n: t.detach().to(CPU, copy=True) for n, t in tensors.items()}
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
        self._keep(
            {n: p.to(self.device, copy=True) for n, p in saved.items() if n.startswith(STATE)}
        )
        self.iteration = int(groups["progress"]["iteration"])
        if self.recognition is not None:
            self.recognition.load_state_dict(groups["recognition"])
        if self.dense is not None:
            self.dense.load_state_dict(groups["dense"])
        # Plain SGD has no state, and checkpoints leave empty groups out.
        restore_optimizer(self.optimizer, groups.get("optimizer", {}), gone=self._gone(groups))

    def begin_with(self, groups: Mapping[str, Params], *, where: str) -> None:
        """Begin with the network of another run, and with its dense classifier where one is wanted.

        Args:
            groups: What its `state_dict` returned.
            where: Name of that run, for messages.
        """
        begin_with(self.params, groups["params"], where=where)
        if "dense" not in groups:
            return
        classifier = classifier_of(groups["dense"])
        if self.dense is not None:
            self.dense.begin_with(classifier)
        if not self.phases.dense:
            hand_over(self.learner, self.params, classifier)

    def _gone(self, groups: Mapping[str, Params]) -> range:
        """Return which numbers of a saved optimizer belong to parameters that are gone.

        Earlier versions gave a memory of offsets an aggregator too, which no step used.
        """
        if self.memory is None or self.memory.aggregator is not None:
            return range(0)
        unused = sum(name.startswith("aggregator.") for name in groups.get(OLD_GROUP, {}))
        first = len(self.learned) + sum(not n.startswith("encoder.") for n in self.memory_learned)
        return range(first, first + unused)

    def _learn(self, learner: Learner, result: OuterStep, episode: Episode) -> float:
        """Take the optimizer's step, and what the network and a staged learner change besides."""
        gradients, advance = {} if self.frozen else moving(self.learner, result.gradients), None
        if isinstance(learner, Staged) and not self.frozen:
            check_finite(result, episode, iteration=self.iteration)
            advance = learner.advance(
                self.params, gradients, about=result.about, iteration=self.episodic
            )
            gradients = advance.gradients
        norms = self._descend(self.learned, gradients)
        self._descend(self.memory_learned, result.memory_gradients)
        norm = check_finite(result, episode, iteration=self.iteration, norm=norms)
        # A norm overflows before its gradient does, and is then clipped to nothing.
        if not math.isfinite(norm) and not all(
            bool(g.isfinite().all()) for g in gradients.values()
        ):
            raise diverged(self.iteration, "the learner has a non-finite gradient")
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.rate_factor
        self.optimizer.step()
        buffers = {} if self.frozen else moving(self.learner, result.buffers)
        for name, buffer in buffers.items():
            self.params[name].data.copy_(buffer)
        if advance is not None:
            self._advance(advance)
        return norm

    def _classify(self, images: Batch) -> StepReport:
        """Take a step of dense classification."""
        if self.dense is None:
            raise ConfigError(
                "images of base classes were given, and nothing classifies these.",
                hint="Give Trainer(dense=DenseConfig(...), base_classes=...).",
            )
        share = self.phases.share_of(self.dense.config, self.iteration)
        loss, norm = self.dense.step(batch_to(images, self.device), rate_factor=share)
        return StepReport(self.iteration, loss[None], float(norm), None, None, None)

    def _advance(self, advance: Advance) -> None:
        for name, tensor in advance.resets.items():
            self.params[name].data.copy_(tensor)
        self._keep(advance.state)

    def _keep(self, state: Params) -> None:
        """Hold what a staged learner keeps from one step to the next."""
        for name in [n for n in self.params if n.startswith(STATE)]:
            del self.params[name]
        self.params.update(detach(state))

    def _remember(self, result: OuterStep, episode: Episode) -> Pending | None:
        """Write what the step leaves behind, and return what its recall was worth."""
        memory, recall, values = self.memory, result.recall, result.values
        if memory is None or recall is None:
            return None
        statistics = pending_statistics(memory.store, recall, values, domain=episode.domain)
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

    def _train_keys(self, episode: Episode) -> Tensor | None:
        """Train the keys, if it is their turn: at every step of the start-up, and less often later on."""
        if self.recognition is None or self.memory is None:
            return None
        if self.episodic >= self.memory.startup and self.episodic % self.recognition.every:
            self.recognition.push(episode.support)
            return None
        return self.recognition.train(episode, self.params, rate_factor=self.rate_factor)

    def _descend(self, tensors: dict[str, Tensor], gradients: Params) -> Tensor:
        """Hand a group's gradient to the optimizer, clipped by the group's own norm."""
        for name, tensor in tensors.items():
            tensor.grad = gradients[name].clone() if name in gradients else None
        if not tensors or self.config.clip is None:
            return _norm(gradients)
        return torch.nn.utils.clip_grad_norm_(list(tensors.values()), self.config.clip)


def _norm(gradients: Params) -> Tensor:
    if not gradients:
        return torch.zeros((), device="cpu")
    return torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
