"""The outer loop: Adam on what is learned, `remember` on what is remembered (Eq. 3, Algorithm 1)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.config.run import OuterConfig
from torchemo.core.errors import CheckpointError, ConfigError, Diverged
from torchemo.core.rng import generator_for
from torchemo.core.tree import detach, is_finite
from torchemo.core.types import Episode, Params, Recall
from torchemo.learners.gradient.meta_sgd import RATE
from torchemo.learners.learner import STATE, Learner, Scheduled, Staged, learned, within
from torchemo.memory.diagnostics import RecallStatistics, recall_statistics
from torchemo.memory.emo import EMO
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.training.step import OuterStep, outer_step


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
        emo: The memory optimizer, or None for the base learner.
        config: The outer loop's choices.
        recognition: Training of the key network by self-recognition.
        seed: Seed of the initialisation.
        horizon: Outer steps of the whole training, over which scheduled rates fall.
        batched: Run the tasks of a step in one call; None: see `torchemo.training.step.runs_together`.
        workers: Threads that share the tasks of a step otherwise.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        emo: EMO | None = None,
        config: OuterConfig | None = None,
        recognition: SelfRecognition | None = None,
        seed: int = 0,
        horizon: int | None = None,
        batched: bool | None = None,
        workers: int = 1,
    ) -> None:
        self.learner = learner
        self.emo = emo
        self.config = OuterConfig() if config is None else config
        self.recognition = recognition
        self.horizon = self._checked_horizon(horizon)
        self.turn = self._turn()
        self.batched = batched
        self.workers = workers
        self.iteration = 0
        drawn = learner.init(generator_for(seed, "learner"))
        self.params: Params = {
            n: p if n.startswith(STATE) else p.requires_grad_() for n, p in drawn.items()
        }
        kind = torch.optim.Adam if self.config.optimizer == "adam" else torch.optim.SGD
        self.learned = learned(learner, self.params)
        self.emo_learned = self._emo_learned()
        self.optimizer: torch.optim.Optimizer = kind(self._groups(), lr=self.config.lr)

    def _groups(self) -> list[dict[str, Any]]:
        """Put learned inner rates in a group of their own if they have an outer rate of their own."""
        own = self.config.rates_lr
        rates = {n: p for n, p in self.learned.items() if own is not None and n.startswith(RATE)}
        others = [p for n, p in self.learned.items() if n not in rates]
        sets = [(others, self.config.lr), (list(rates.values()), own)]
        sets.append((list(self.emo_learned.values()), self.config.lr))
        return [{"params": ps, "lr": lr, "initial_lr": lr} for ps, lr in sets if ps]

    def _checked_horizon(self, horizon: int | None) -> int | None:
        if self.config.schedule != "constant" and (horizon is None or horizon < 1):
            raise ConfigError(
                f"outer.schedule '{self.config.schedule}' needs the length of the training,"
                f" got horizon {horizon}.",
                hint="Give Trainer(horizon=iterations), or use schedule 'constant'.",
            )
        return horizon

    def _turn(self) -> int | None:
        """Return the step at which the learner rests and slots begin to learn; they are then seeded there."""
        share = None if self.emo is None else self.emo.policy.afterwards
        if self.emo is None or share is None:
            return None
        if self.horizon is None:
            raise ConfigError(
                "slots that learn after the learner need the length of the training.",
                hint="Give Trainer(horizon=iterations), or set memory.afterwards to None.",
            )
        turn = max(1, round(share * self.horizon))
        self.emo.policy = replace(self.emo.policy, warmup=turn)
        return turn

    @property
    def rate_factor(self) -> float:
        """Share of the outer rates in the present step: ``(1 + cos(pi t / horizon)) / 2``, or 1.

        Where the memory learns after the learner, the rates of each fall over its own part of the training.
        """
        if self.config.schedule == "constant" or self.horizon is None:
            return 1.0
        start, end = 0, self.horizon
        if self.turn is not None:
            start, end = (self.turn, end) if self.rests else (start, self.turn)
        passed = min((self.iteration - start) / max(1, end - start), 1.0)
        return (1 + math.cos(math.pi * passed)) / 2

    @property
    def rests(self) -> bool:
        """Whether the learner has learned, and the memory alone goes on (`Policy.afterwards`)."""
        return self.turn is not None and self.iteration >= self.turn

    def _emo_learned(self) -> dict[str, Tensor]:
        if self.emo is None:
            return {}
        # Keys that learn to recognise their own task have an optimizer of their own.
        keys = "encoder." if self.recognition is not None else None
        return {
            n: p
            for n, p in self.emo.named_parameters()
            if p.requires_grad and not (keys and n.startswith(keys))
        }

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
            emo=self.emo,
            batched=self.batched,
            workers=self.workers,
        )
        self._refuse_divergence(result, episode)
        norm = self._learn(learner, result)
        recognition_loss = self._train_keys(episode)
        statistics = None
        if self.emo is not None and result.recall is not None:
            memory, recall, values = self.emo.memory, result.recall, result.values
            statistics = recall_statistics(memory, recall, values, domain=episode.domain)
            self._remember(self.emo, recall, values)
        report = StepReport(
            self.iteration, result.losses, norm, result.recall, recognition_loss, statistics
        )
        self.iteration += 1
        return report

    def skip(self) -> None:
        """Leave out a step whose tasks could not be used."""
        self.iteration += 1

    def state(self) -> dict[str, Params]:
        """Return everything that a resumed run needs, as groups of named tensors."""
        groups: dict[str, Params] = {
            "params": {n: p.detach() for n, p in self.params.items()},
            "optimizer": _optimizer_state(self.optimizer),
            "progress": {"iteration": torch.tensor(self.iteration)},
        }
        if self.emo is not None:
            groups["emo"] = self.emo.state_dict()
        if self.recognition is not None:
            groups["recognition"] = self.recognition.state_dict()
        return groups

    def restore(self, groups: Mapping[str, Params]) -> None:
        """Take over a state that `state` returned.

        Raises:
            CheckpointError: The state belongs to another learner or memory.
        """
        saved = groups.get("params", {})
        expected = {n: p.shape for n, p in self.params.items() if not n.startswith(STATE)}
        got = {n: p.shape for n, p in saved.items() if not n.startswith(STATE)}
        if expected != got or ("emo" in groups) != (self.emo is not None):
            raise CheckpointError(
                f"the saved state has parameters {sorted(got)}, this run has {sorted(expected)}.",
                hint="Resume with the configuration the run was started with.",
            )
        if self.emo is not None:
            self.emo.load_state_dict(groups["emo"])
        if self.recognition is not None:
            self.recognition.load_state_dict(groups["recognition"])
        for name in expected:
            self.params[name].data.copy_(saved[name])
        self._keep({n: p for n, p in saved.items() if n.startswith(STATE)})
        # Plain SGD has no state, and checkpoints leave empty groups out.
        _restore_optimizer(self.optimizer, groups.get("optimizer", {}))
        self.iteration = int(groups["progress"]["iteration"])

    def _learn(self, learner: Learner, result: OuterStep) -> float:
        """Take the optimizer's step, and what the network and a staged learner change besides."""
        gradients, advance = {} if self.rests else result.gradients, None
        if isinstance(learner, Staged) and not self.rests:
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
        self._descend(self.emo_learned, result.emo_gradients)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.rate_factor
        self.optimizer.step()
        buffers = {} if self.rests else result.buffers
        for name, buffer in buffers.items():
            self.params[name].data.copy_(buffer)
        if advance is not None:
            for name, tensor in advance.resets.items():
                self.params[name].data.copy_(tensor)
            self._keep(advance.state)
        return norm

    def _keep(self, state: Params) -> None:
        """Hold what a staged learner keeps from one step to the next."""
        for name in [n for n in self.params if n.startswith(STATE)]:
            del self.params[name]
        self.params.update(detach(state))

    def _remember(self, emo: EMO, recall: Recall, values: Params) -> None:
        emo.remember(recall, values, params=self.params, rate_factor=self.rate_factor)
        warm = int(emo.memory.ledger.iteration) == max(1, emo.policy.warmup)
        if emo.consolidates and warm and self.recognition is not None:
            # Pauses between trainings slow the keys down as well.
            pace = self.config.recognition_after * self.recognition.every
            self.recognition.slow_down(min(1.0, pace))

    def _train_keys(self, episode: Episode) -> float | None:
        """Train the keys, if it is their turn: at every step of the start-up, and less often later on."""
        if self.recognition is None or self.emo is None:
            return None
        if self.iteration >= self.emo.policy.warmup and self.iteration % self.recognition.every:
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
            if not all(bool(g.isfinite().all()) for g in result.emo_gradients.values()):
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


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Params) -> None:
    state: dict[int, Params] = {}
    for key, tensor in saved.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor.clone()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
