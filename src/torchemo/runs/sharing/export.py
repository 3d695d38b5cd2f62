"""An adapted classifier as a file for other programs: ONNX, or a program of ``torch.export``."""

import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

import torchemo
from torchemo.core.errors import ConfigError, TorchemoError
from torchemo.core.rng import generator_for
from torchemo.runs.adapt import Adapted
from torchemo.runs.sharing.network import AdaptedNetwork
from torchemo.runs.storage.durable import replace_file

Format: TypeAlias = Literal["onnx", "torch"]
SUFFIXES: Mapping[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
LARGEST_DIFFERENCE = 1e-4
"""A file whose probabilities differ more from those of torch is not written."""
NOISE = 8
"""Images of noise that a file is checked on, beside those that are given."""

Answer: TypeAlias = Callable[[np.ndarray], np.ndarray]


class Exported(NamedTuple):
    """A file that was written.

    Attributes:
        file: The file.
        size: Its bytes.
        checked: Images on which it was compared with torch.
        difference: Largest difference of a probability there.
        about: What the file says of itself.
    """

    file: Path
    size: int
    checked: int
    difference: float
    about: dict[str, str]


def export(
    adapted: Adapted,
    out: Path,
    *,
    kind: Format | None = None,
    images: np.ndarray | None = None,
    name: str = "",
) -> Exported:
    """Write an adapted classifier: images ``uint8 [batch, channels, height, width]`` to probabilities.

    Args:
        adapted: A run fitted to a support set.
        out: The file; it is replaced once the new one has passed its check.
        kind: Its format; None takes that of its ending.
        images: Images of the right size, to check the file on beside noise.
        name: What to call the run in the file.

    Raises:
        ConfigError: The network cannot be written in this format, or it would answer otherwise than torch.
    """
    kind = format_of(out) if kind is None else kind
    if kind == "onnx":
        require_onnx()
    network, about = AdaptedNetwork(adapted).eval(), described(adapted, name=name)
    seen = _checked_on(adapted, images)
    data, answer = _written(kind, network, seen, about)
    difference = _compared(network, answer, seen)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, data)
    return Exported(out, len(data), len(seen), difference, about)


def format_of(out: Path) -> Format:
    """Return the format of a file by its ending."""
    found = [kind for kind, suffix in SUFFIXES.items() if out.suffix == suffix]
    if not found:
        raise ConfigError(
            f"{out}: a file to export to ends with {' or '.join(SUFFIXES.values())}.",
            hint="Rename it, or give the format.",
        )
    return found[0]


def described(adapted: Adapted, *, name: str = "") -> dict[str, str]:
    """Return what a file says of itself; text alone, for ONNX knows nothing else."""
    form, system = adapted.form, adapted.trained.system
    colours = "red, green, blue" if form.channels == 3 else "grey"
    return {
        "classes": json.dumps(list(adapted.classes)),
        "support_images": json.dumps(list(adapted.shots)),
        "method": system.title,
        "outer_steps": str(system.iteration),
        "inner_steps": str(adapted.inner_steps),
        "input": f"images: uint8 [batch, {form.channels}, {form.height}, {form.width}], {colours}, 0 to 255;"
        " the whole image resized, without crop",
        "output": "probabilities: float32 [batch, classes]",
        "torchemo_version": torchemo.__version__,
        **({"run": name} if name else {}),
    }


def require_onnx() -> None:
    """Refuse to begin where a package is missing that writes or checks ONNX."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"ONNX needs the package {package}, which is not installed.",
                hint="Install it: pip install 'torchemo[onnx]'; or use --format torch.",
            ) from error


def _checked_on(adapted: Adapted, images: np.ndarray | None) -> np.ndarray:
    form = adapted.form
    shape = (NOISE, form.channels, form.height, form.width)
    noise = torch.randint(256, shape, generator=generator_for(0, "export"), dtype=torch.uint8)
    return noise.numpy() if images is None else np.concatenate([images, noise.numpy()])


def _written(
    kind: Format, network: AdaptedNetwork, images: np.ndarray, about: Mapping[str, str]
) -> tuple[bytes, Answer]:
    """Return the file, and a function that answers as it does."""
    write = {"onnx": _as_onnx, "torch": _as_program}[kind]
    try:
        with _quiet():
            return write(network, torch.from_numpy(images[:2]), about)
    except TorchemoError:
        raise
    except Exception as error:  # torch raises many kinds for what it cannot trace
        first = str(error).strip().splitlines() or [type(error).__name__]
        other = "torch" if kind == "onnx" else "onnx"
        raise ConfigError(
            f"this network cannot be written as {kind}: {first[0]}", hint=f"Try --format {other}."
        ) from error


def _as_onnx(
    network: AdaptedNetwork, images: Tensor, about: Mapping[str, str]
) -> tuple[bytes, Answer]:
    onnx, runtime = import_module("onnx"), import_module("onnxruntime")
    program: Any = torch.onnx.export(
        network,
        (images,),
        input_names=["images"],
        output_names=["probabilities"],
        dynamic_shapes=_any_batch(),
        dynamo=True,
        verbose=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        program.save(file)
        model = onnx.load(file)
    model.producer_name, model.producer_version = "torchemo", torchemo.__version__
    onnx.helper.set_model_props(model, dict(about))
    _without_places(model)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda x: session.run(None, {"images": x})[0]


def _without_places(model: Any) -> None:
    """Drop what the exporter notes of lines of code: it holds paths of this machine."""
    for part in (model.graph, *model.functions):
        for node in part.node:
            del node.metadata_props[:]
            node.doc_string = ""


def _as_program(
    network: AdaptedNetwork, images: Tensor, about: Mapping[str, str]
) -> tuple[bytes, Answer]:
    program = torch.export.export(network, (images,), dynamic_shapes=_any_batch(), strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # holds paths of this machine
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"torchemo.json": json.dumps(about)})
    read = torch.export.load(io.BytesIO(file.getvalue())).module()
    return file.getvalue(), lambda x: read(torch.from_numpy(x)).detach().numpy()


def _any_batch() -> dict[str, Any]:
    return {"images": {0: torch.export.Dim("batch")}}


def _compared(network: AdaptedNetwork, answer: Answer, images: np.ndarray) -> float:
    """Return the largest difference between a file and torch, in batches of several sizes."""
    with torch.no_grad():
        expected = network(torch.from_numpy(images)).numpy()
    parts = (images[:1], images[1:4], images[4:])
    found = np.concatenate([answer(part) for part in parts if len(part)])
    difference = float(np.abs(found - expected).max())
    if not difference <= LARGEST_DIFFERENCE:  # NaN is not small
        raise ConfigError(
            f"the file answers otherwise than torch: probabilities differ by {difference:.2g}, more than"
            f" {LARGEST_DIFFERENCE:g}. Nothing was written.",
            hint="Try the other --format.",
        )
    return difference


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what exporters say of packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
