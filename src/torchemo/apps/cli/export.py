"""``torchemo export``: an adapted classifier as a file for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, final

import tyro

from torchemo.core.errors import LEFT_OUT, ConfigError
from torchemo.report.terminal import print_json, say, say_left_out


@final
@dataclass(frozen=True)
class ExportCommand:
    """Adapt a trained run to a few images per class and write the classifier as a file.

    The file maps images of one size, uint8 [batch, channels, height, width], to probabilities. Normalisation
    and class names are inside. It is compared with torch before it is kept. It holds no image.
    """

    run_folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """Folder of the run; its own data are not needed."""
    support: Path
    """Folder with one folder of images per class."""
    format: Literal["onnx", "torch"] | None = None
    """onnx (extra: onnx) or torch (a program of torch.export); that of the ending of --out, else onnx."""
    out: Path | None = None
    """The file, .onnx or .pt2; classifier.onnx or classifier.pt2 in the run by default."""
    step: int | None = None
    """Checkpoint to use; the best on validation tasks by default."""
    steps: int | None = None
    """Inner steps; those of training by default."""
    invert: bool = False
    """Swap dark and light: for runs on bright ink (Omniglot) and dark ink in the images."""
    strict: bool = False
    """Refuse images that cannot be read, instead of leaving them out."""
    json: bool = False
    """Print what was written as JSON."""

    def run(self) -> int:
        """Run the command; 7 if images that cannot be read were left out."""
        from torchemo.runs.sharing.export import export, require_onnx
        from torchemo.runs.sharing.support import adapted_with_images

        out, kind = self._place()
        if kind == "onnx":
            require_onnx()  # before anything is read
        adapted, images = adapted_with_images(
            self.run_folder,
            self.support,
            step=self.step,
            steps=self.steps,
            invert=self.invert,
            strict=self.strict,
        )
        name = self.run_folder.resolve().name
        found = export(adapted, out, kind=kind, images=images, name=name)
        code = LEFT_OUT if adapted.left_out else 0
        if self.json:
            left_out = [one._asdict() for one in adapted.left_out]
            print_json({**found._asdict(), "file": str(found.file), "left_out": left_out})
            return code
        size = f"{found.size / 1e6:.1f} MB" if found.size >= 1e6 else f"{found.size / 1e3:.0f} kB"
        say(f"{found.about['method']} for {', '.join(adapted.classes)}")
        say(f"takes {found.about['input']}")
        say(
            f"as torch to {found.difference:.1g} on {found.checked} images, written: {found.file} ({size})"
        )
        say_left_out(adapted.left_out)
        return code

    def _place(self) -> tuple[Path, Literal["onnx", "torch"]]:
        """Return file and format, which have to agree."""
        from torchemo.runs.sharing.export import SUFFIXES, format_of

        kind = self.format or ("onnx" if self.out is None else format_of(self.out))
        out = self.run_folder / f"classifier{SUFFIXES[kind]}" if self.out is None else self.out
        if out.suffix != SUFFIXES[kind]:
            raise ConfigError(
                f"--format {kind} makes a file that ends with {SUFFIXES[kind]}, got --out {out}.",
                hint="Leave out one of them, or rename the file.",
            )
        if out.is_dir():
            raise ConfigError(f"--out {out} is a folder, not a file.")
        return out, kind
