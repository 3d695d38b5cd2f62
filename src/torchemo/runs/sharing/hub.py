"""Runs for other people: ``save_pretrained`` and ``from_pretrained`` (extra ``hub``).

Folders on this machine need no network. Nothing is sent or fetched unless a repository is named.
"""

from pathlib import Path
from typing import Any, final

from torchemo.core.errors import ConfigError
from torchemo.runs.run import PathLike, Run, load
from torchemo.runs.sharing.card import card, results_of, summary
from torchemo.runs.sharing.strip import write_stripped

try:
    from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
except ImportError as error:
    raise ConfigError(
        "sharing a run needs the package huggingface-hub, which is not installed.",
        hint="Install it: pip install 'torchemo[hub]'",
    ) from error

TAGS = ("few-shot-learning", "meta-learning", "torchemo")


@final
class SharedRun(ModelHubMixin, library_name="torchemo", tags=list(TAGS)):
    """A trained run that can be saved for others and read again.

    What is saved: weights and memory as safetensors with checksums, the configuration, and a model card made
    of the run. Never an image, nor a place on this machine.

    Args:
        run: A trained run, or its folder.

    Example:
        >>> import tempfile
        >>> import torchemo
        >>> out = tempfile.mkdtemp()
        >>> run = torchemo.train("maml", data="regression:sinusoid", out=f"{out}/a", steps=2, shot=5)
        >>> _ = SharedRun(run).save_pretrained(f"{out}/shared")
        >>> SharedRun.from_pretrained(f"{out}/shared").run.trained.system.iteration
        2
    """

    def __init__(self, run: "Run | PathLike") -> None:
        self.run = run if isinstance(run, Run) else load(run)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write the run; `ModelHubMixin.save_pretrained` calls this."""
        run, trained = self.run, self.run.trained
        write_stripped(run.root, save_directory, step=run.step)
        results = results_of(run.root)
        (save_directory / "config.json").write_text(summary(trained, results))
        text = f"---\n{self._front().to_yaml()}\n---\n\n{card(run.root, trained, results)}"
        ModelCard(text).save(save_directory / "README.md")

    def _front(self) -> ModelCardData:
        images = len(self.run.trained.shape.x) == 3 or self.run.trained.network is not None
        kind = "image-classification" if images else None
        return ModelCardData(library_name="torchemo", tags=list(TAGS), pipeline_tag=kind)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        **others: Any,
    ) -> "SharedRun":
        """Read a folder, or fetch a repository; `ModelHubMixin.from_pretrained` calls this."""
        if not Path(model_id).is_dir():
            model_id = snapshot_download(
                model_id,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
        return cls(model_id)
