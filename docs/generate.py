"""Write the pages of the reference from the package itself: names, commands, options, presets.

The build calls it (``make docs``), so that these pages cannot differ from the code.
"""

import contextlib
import io
import json
import os
import re
from pathlib import Path

import torchemo
from torchemo.apps.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
GROUPS = {
    "In your own loop": (
        *("for_module", "apply_", "EMO", "OffsetMemory", "EpisodicMemory", "Recall"),
        *("TransformerKey", "Mean", "Sum", "Gated", "FIFO", "LRU", "Clock"),
    ),
    "Whole runs": ("train", "load", "compare", "preset", "TorchemoError"),
    "Meta-training": (
        *("Episode", "TaskShape", "Trainer", "build_trainer", "outer_step", "predict", "evaluate"),
    ),
    "Networks": ("Conv4", "ResNet12", "MLP", "lift"),
}
"""The public names in the order of the page; a test compares them with ``torchemo.__all__``."""


def write_reference(folder: Path) -> None:
    """Write all generated pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"api": api(), "commands": commands(), "options": options(), "presets": presets()}
    for name in ("SECURITY", "CONTRIBUTING"):
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        pages[name.lower()] = text.replace("](docs/", "](../../")
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def api() -> str:
    """Return the page of public names."""
    parts = ["# Python\n", "Every name here is imported from `torchemo`.\n"]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [_member(name) for name in names]
    return "\n".join(parts)


def _member(name: str) -> str:
    kind = "class" if isinstance(getattr(torchemo, name), type) else "function"
    members = "\n:members:\n:inherited-members: Module, tuple, Exception" if kind == "class" else ""
    return f"```{{eval-rst}}\n.. auto{kind}:: torchemo.{name}{_indented(members)}\n```\n"


def _indented(text: str) -> str:
    return text.replace("\n", "\n   ")


def commands() -> str:
    """Return the page of commands, each with its own help text."""
    parts = ["# Commands\n", "Exit codes: 0 ok, 1 internal error, 2 usage, 3 data, 4 checkpoint,"]
    parts.append("5 diverged, 6 resources, 130 or 143 interrupted after saving.\n")
    for command in COMMANDS:
        about = printed(command, "--help")
        parts += [f"## torchemo {command}\n", _help((command,), about)]
        listed = re.match(r"usage: torchemo \w+ \[-h\] \{([^}]*)\}", about)
        for word in listed[1].split(",") if listed else ():
            parts.append(_help((command, word), printed(command, word, "--help")))
    return "\n".join(parts)


def _help(words: tuple[str, ...], text: str) -> str:
    return f"```text\n$ torchemo {' '.join(words)} --help\n{text}```\n"


def options() -> str:
    """Return the page of all options, section by section and part by part."""
    listed = json.loads(printed("options", "--json"))
    parts = [
        "# Options\n",
        "A run lists the options of its own parts alone: `torchemo options PART`.\n",
    ]
    seen: set[tuple[str, ...]] = set()
    for section, names in listed.items():
        if names and tuple(names) in seen:
            continue
        seen.add(tuple(names))
        parts.append(f"## {section}\n")
        described = [f"{section}.{name}" for name in names] or [section]
        parts += [_options_of(part, titled=bool(names)) for part in described]
    return "\n".join(parts)


def _options_of(part: str, *, titled: bool) -> str:
    found = json.loads(printed("options", part, "--json"))["options"]
    title = f"### {part}\n\n" if titled else ""
    if not found:
        return f"{title}No options.\n"
    rows = [
        f"| `{o['name']}` | {_cell(o['type'])} | `{_cell(o['default'])}` | {_cell(o['help'])} |"
        for o in found
    ]
    head = "| option | type | default | what it does |\n|---|---|---|---|\n"
    return title + head + "\n".join(rows) + "\n"


def presets() -> str:
    """Return the page of presets, each with what it is."""
    listed = json.loads(printed("presets", "--json"))
    parts = ["# Presets\n", "`torchemo presets NAME` prints one as a complete TOML file.\n"]
    parts.append("| preset | what it is |\n|---|---|")
    parts += [f"| `{one['name']}` | {_cell(one['about'])} |" for one in listed]
    return "\n".join(parts) + "\n"


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def printed(*words: str) -> str:
    """Return what a command prints, 80 columns wide and without colours."""
    os.environ.update(COLUMNS="80", NO_COLOR="1", TERM="dumb")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(words)
    return out.getvalue()
