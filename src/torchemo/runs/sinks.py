"""Optional copies of the event log, for tools that teams already look at. Imported only when used."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, final

from torchemo.core.errors import ConfigError
from torchemo.runs.events import RESERVED, Event, EventLog, JsonLines, Sink, plain
from torchemo.runs.folder import RunFolder
from torchemo.runs.storage.durable import StrPath


def numbers(event: Event) -> dict[str, float]:
    """Pick what can be drawn as a curve, named ``event/field``."""
    return {
        f"{event['event']}/{name}": float(value)
        for name, value in plain(event).items()
        if name not in RESERVED and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


@final
class TensorBoard:
    """Draw the numbers of events as TensorBoard curves."""

    def __init__(self, folder: StrPath) -> None:
        module = _optional("torch.utils.tensorboard", extra="tensorboard")
        self._writer: Any = module.SummaryWriter(log_dir=str(folder))

    def write(self, event: Event) -> None:
        """Add one point to the curve of every number."""
        for name, value in numbers(event).items():
            self._writer.add_scalar(name, value, global_step=event["step"])

    def flush(self) -> None:
        """Write what is pending."""
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


@final
class WeightsAndBiases:
    """Send the numbers of events to Weights & Biases. The user named it, so the network may be used."""

    def __init__(self, project: str, *, name: str) -> None:
        module = _optional("wandb", extra="wandb")
        self._run: Any = module.init(project=project, name=name)

    def write(self, event: Event) -> None:
        """Log every number at its step."""
        self._run.log(numbers(event), step=event["step"])

    def flush(self) -> None:
        """Do nothing: wandb sends by itself."""

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()


class _Kind(NamedTuple):
    module: str
    open: Callable[[Path], Sink]


SINKS = {
    "tensorboard": _Kind("torch.utils.tensorboard", lambda run: TensorBoard(run / "tensorboard")),
    "wandb": _Kind("wandb", lambda run: WeightsAndBiases("torchemo", name=run.resolve().name)),
}
"""What ``train --log`` takes; the names are those of the extras, too."""


def require(names: Sequence[str]) -> None:
    """Refuse sinks that there are not, or whose package is not installed."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"there is no log '{name}'.", hint=f"One of: {', '.join(SINKS)}.")
        _optional(SINKS[name].module, extra=name)


def open_log(run: Path, *, copies: Sequence[str] = ()) -> EventLog:
    """Open the log of a run, with copies: TensorBoard in its folder, Weights & Biases under its name."""
    kept = JsonLines(RunFolder(run).events)
    return EventLog(kept, copies=[SINKS[name].open(run) for name in copies])


def _optional(module: str, *, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{extra} is not installed ({error}).", hint=f"pip install 'torchemo[{extra}]'"
        ) from error
