"""Optional copies of the event log, for tools that teams already look at. Imported only when used."""

from importlib import import_module
from types import ModuleType
from typing import Any, final

from torchemo.core.errors import ConfigError
from torchemo.runs.events import RESERVED, Event, plain
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


def _optional(module: str, *, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{extra} is not installed ({error}).", hint=f"pip install 'torchemo[{extra}]'"
        ) from error
