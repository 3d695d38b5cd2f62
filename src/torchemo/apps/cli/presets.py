"""``torchemo presets``: which presets there are, and one of them in full."""

from dataclasses import dataclass
from typing import Annotated, Any, final

import tyro

from torchemo.config.presets import MEMORIES, PUBLISHED, about, first_sentence, names, parts_of
from torchemo.core.errors import ConfigError
from torchemo.report.terminal import print_json, print_table, say


@final
@dataclass(frozen=True)
class PresetsCommand:
    """List the presets by learner, or print one as a complete TOML file."""

    name: tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="NAME")]] = None
    """Print this preset; train takes the output as --config."""
    shot: int = 1
    """With NAME: support examples per class, on which the paper's presets depend."""
    regression: bool = False
    """With NAME: for regression tasks."""
    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        """Run the command."""
        if self.name is not None:
            return self._print(self.name)
        if self.shot != 1 or self.regression:
            raise ConfigError("--shot and --regression belong to a NAME.")
        if self.json:
            print_json([_described(name) for name in names()])
        else:
            _show()
        return 0

    def _print(self, name: str) -> int:
        from torchemo.config.presets import preset
        from torchemo.config.toml import dumps, to_dict
        from torchemo.runs.experiment import complete

        config = complete(preset(name, n_shot=self.shot, regression=self.regression))
        if self.json:
            print_json(to_dict(config))
        else:
            say(f"# Preset {name}. {about(name)}\n{dumps(config)}", end="")
        return 0


def _described(name: str) -> dict[str, Any]:
    learner, memory = parts_of(name)
    return {"name": name, "learner": learner, "memory": memory, "about": about(name)}


def _show() -> None:
    by_learner: dict[str, list[str]] = {}
    for name in names():
        by_learner.setdefault(parts_of(name)[0], []).append(name)
    rows = [[learner, ", ".join(own), about(learner)] for learner, own in by_learner.items()]
    print_table("Presets by learner", ["learner", "presets", "what it is"], rows)
    endings = [[f"-{memory}", first_sentence("memory", memory)] for memory in reversed(MEMORIES)]
    endings.append(
        [f"-{PUBLISHED}", "The learner alone, with published sizes, for images of 84 x 84."]
    )
    print_table("Endings", ["ending", "what it adds"], endings)
    say("one in full: torchemo presets NAME; its options: torchemo options")
