"""The rules of the house: packages, layers, sizes, and who may know whom."""

import ast
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import torchemo
from torchemo.learners import LEARNERS
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.memory import MEMORIES
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.build import MemoryOptions
from torchemo.memory.controllers import CONTROLLERS
from torchemo.memory.keys import KEYS
from torchemo.memory.keys.encoder import KeyOptions
from torchemo.models import MODELS

ROOT = Path(torchemo.__file__).parent
PACKAGES = {
    "apps",
    "config",
    "core",
    "data",
    "interop",
    "lab",
    "learners",
    "memory",
    "models",
    "report",
    "runs",
    "training",
}
MOST_LINES, MOST_MODULES, LONGEST = 400, 16, 40
CONCRETE = {
    "learners": r"(\w*MAML\w*|ANIL|BOIL|ARML\w*|HSML\w*|BMG|MUSML|MetaSGD|Reptile|TaskGated|\w+Net\w*)",
    "memory": r"(Mean|Sum|Gated|GateTransformer|CoordinateTransformer|FIFO|LRU|Clock|EMO|OffsetMemory)",
}
"""Names of learners, and of memories and their parts, with the package that may ask for them."""


@cache
def sources():
    """Every module of the package as ``{name: text}``."""
    return {
        p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in sorted(ROOT.rglob("*.py"))
    }


def imports_of(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_there_are_twelve_packages_and_nothing_else():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith("__")}
    assert found == PACKAGES | {"py.typed"}


def test_nothing_imports_the_lab():
    outside = {name: text for name, text in sources().items() if not name.startswith("lab/")}
    guilty = {
        n for n, t in outside.items() if any(i.startswith("torchemo.lab") for i in imports_of(t))
    }
    assert not guilty


def test_no_file_is_too_long():
    assert not {n for n, t in sources().items() if len(t.splitlines()) > MOST_LINES}


def test_no_folder_is_too_full():
    folders = [name.rpartition("/")[0] for name in sources()]
    assert not {folder for folder in folders if folders.count(folder) > MOST_MODULES}


def test_no_function_is_too_long():
    long = {
        f"{name}:{node.name}"
        for name, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > LONGEST
    }
    assert not long


def test_only_its_own_package_asks_for_a_concrete_part():
    guilty = {
        name
        for name, text in sources().items()
        for package, pattern in CONCRETE.items()
        if not name.startswith(f"{package}/")
        and re.search(rf"isinstance\([^)]*\b{pattern}\b[^)]*\)", text)
    }
    assert not guilty


def test_only_gradient_learners_know_their_inner_loop():
    reads = re.compile(r"learner\.loop\b")
    guilty = {
        name
        for name, text in sources().items()
        if not name.startswith("learners/gradient/") and reads.search(text)
    }
    assert not guilty


def test_every_part_has_a_builder_and_options_with_help():
    for registry in (AGGREGATORS, CONTROLLERS, KEYS, LEARNERS, MEMORIES, MODELS):
        for name in registry:
            part, options = registry[name], registry.options_of(name)
            assert callable(part.build), name
            assert is_dataclass(options), name
            assert options.__dataclass_params__.frozen, name
            assert (part.__doc__ or "").strip(), name


def test_no_part_is_compared_by_name_outside_its_registry():
    names = {n for registry in (AGGREGATORS, CONTROLLERS, KEYS, LEARNERS) for n in registry}
    # Words that are no names of parts alone.
    names -= {"mean", "sum", "learner"}
    compares = re.compile(r"""(?:==|!=)\s*["']({})["']""".format("|".join(map(re.escape, names))))
    outside = ("lab/", "learners/", "memory/")
    guilty = {
        name: found.group(0)
        for name, text in sources().items()
        if not name.startswith(outside) and (found := compares.search(text))
    }
    assert not guilty


STORAGE = {"value_dtype", "values_dir"}
"""How and where values are kept is a matter of the machine, not of the method."""


def test_an_option_that_parts_share_is_set_by_a_preset_or_a_study():
    """What nobody sets is an argument of a class; options of a single part stand beside it."""
    text = "".join(p.read_text("utf-8") for p in ROOT.glob("config/presets/*/*.toml"))
    text += "".join(t for name, t in sources().items() if name.startswith("lab/"))
    text += "".join(p.read_text("utf-8") for p in ROOT.glob("lab/study/*.toml"))
    shared = {f.name for kind in (KeyOptions, LoopOptions, MemoryOptions) for f in fields(kind)}
    assert not {n for n in shared - STORAGE if not re.search(rf"\b{n}\b\s*=", text)}


COMPUTES = ("core/", "interop/", "learners/", "memory/", "models/", "training/")
"""Packages whose tensors may be on the device of a run."""
MAKERS = {
    *(
        "arange",
        "as_tensor",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
    ),
    *("randperm", "tensor", "triu_indices", "zeros"),
}


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, node.func.attr if isinstance(node.func, ast.Attribute) else ""


def placed(tree):
    """Yield what its module, or a call of ``to``, puts on a device."""
    for node, name in calls(tree):
        if name in ("Parameter", "register_buffer"):
            yield from (part for argument in node.args for part in ast.walk(argument))
        elif name == "to":
            yield from ast.walk(node.func.value)


def test_a_tensor_is_made_on_a_device_that_is_named():
    """With ``device=``, from another tensor, or by a generator, whose device is that of what it draws."""
    guilty = []
    for module, text in sources().items():
        if module.startswith(COMPUTES):
            tree = ast.parse(text)
            known = {id(node) for node in placed(tree)}
            for node, name in calls(tree):
                given = {keyword.arg for keyword in node.keywords}
                made = name in MAKERS and getattr(node.func.value, "id", "") == "torch"
                if made and id(node) not in known and not given & {"device", "generator", "out"}:
                    guilty.append(f"{module}:{node.lineno}")
    assert not guilty


def test_commands_print_through_one_function():
    """What files and strangers wrote must not reach a terminal as a command: see `say`."""
    guilty = {
        f"{name}:{node.lineno}"
        for name, text in sources().items()
        if name.startswith(("apps/", "lab/commands/", "report/")) and name != "report/terminal.py"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    }
    assert not guilty
