"""Errors for people: what happened, where, and what to do about it."""

from typing import final

LEFT_OUT = 7
"""Exit code of a command that did its work and left out images that it could not read."""


class TorchemoError(Exception):
    """Any error that torchemo raises on purpose.

    Args:
        message: What happened and where; says expected and got when something does not fit.
        hint: What to do about it, one sentence.

    Example:
        >>> import torchemo
        >>> try:
        ...     torchemo.preset("mamml")
        ... except torchemo.TorchemoError as error:
        ...     print(error.hint)
        Did you mean 'maml'?
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n{hint}")
        self.message = message
        self.hint = hint


class ConfigError(TorchemoError):
    """An option has a value that cannot work, alone or beside another option."""

    exit_code = 2


@final
class DataError(TorchemoError):
    """An image, label, class or task is not what the work needs."""

    exit_code = 3


@final
class ShapeError(TorchemoError):
    """A tensor, or a set of named tensors, has another shape or structure than expected."""

    exit_code = 3


@final
class MemoryWriteError(TorchemoError):
    """The episodic memory refused a write; nothing was changed."""

    exit_code = 3


@final
class CheckpointError(TorchemoError):
    """A saved state is damaged, incomplete, or belongs to something else."""

    exit_code = 4


@final
class Diverged(TorchemoError):
    """Training produced non-finite numbers and was stopped."""

    exit_code = 5


class ResourceError(TorchemoError):
    """Not enough memory or disk for what was asked, or something that is needed does not answer."""

    exit_code = 6


@final
class RunExists(ConfigError):
    """The folder for a new run holds one already."""


@final
class RunInUse(ResourceError):
    """Another process writes the run."""
