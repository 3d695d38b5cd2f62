"""``torchemo adapt``: a folder of support images and a folder of queries in, predictions out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import tyro

from torchemo.report.terminal import print_json, print_table

if TYPE_CHECKING:
    from torchemo.runs.adapt import Answers


@final
@dataclass(frozen=True)
class AdaptCommand:
    """Adapt a trained run to a few images per class and sort other images by it."""

    run_folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """Folder of the run; its own data are not needed."""
    support: Path
    """Folder with one folder of images per class; any size, colour mode or rotation."""
    query: Path
    """Folder of images to sort, or one image. No answer depends on the other images."""
    out: Path | None = None
    """Where predictions.json and sheet.html go; RUN/adapted by default."""
    step: int | None = None
    """Checkpoint to use; the best on validation tasks by default."""
    steps: int | None = None
    """Inner steps; those of training by default."""
    invert: bool = False
    """Swap dark and light: for runs on bright ink (Omniglot) and dark ink in the images."""
    json: bool = False
    """Print the predictions as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.report.sheet import sheet
        from torchemo.runs.adapt import adapt
        from torchemo.runs.load import load_trained
        from torchemo.runs.storage.durable import replace_file

        trained = load_trained(self.run_folder, step=self.step)
        adapted = adapt(trained, self.support, steps=self.steps, invert=self.invert)
        answers = adapted.predict(self.query)
        found = {"run": str(self.run_folder), **answers.to_dict()}
        out = self.run_folder / "adapted" if self.out is None else self.out
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / "predictions.json", (json.dumps(found, indent=2) + "\n").encode())
        page = sheet(answers, self.support, query=self.query)
        replace_file(out / "sheet.html", page.encode(errors="replace"))
        if self.json:
            print_json(found)
        else:
            _show(answers)
            print(f"written: {out / 'predictions.json'}, {out / 'sheet.html'}")
        return 0


def _show(answers: "Answers") -> None:
    rows = [
        [
            p.file,
            p.predicted,
            f"{p.probability:.3f}",
            "" if p.runner_up is None else f"{p.runner_up} {p.runner_up_probability:.3f}",
        ]
        for p in answers.predictions
    ]
    print_table(answers.method, ["file", "predicted", "probability", "runner-up"], rows)
    if answers.familiar is False:
        print("recall was skipped: these images are unlike the tasks of training")
    if answers.helpful is False:
        print("recall was skipped: the slots for such tasks failed validation")
    if answers.recalled:
        slots = ", ".join(
            f"{one.slot} ({'' if one.domain is None else f'{one.domain}, '}{one.distance:.3f})"
            for one in answers.recalled[:5]
        )
        more = len(answers.recalled) - 5
        print(
            f"recalled slots, with their distance: {slots}{f' and {more} more' if more > 0 else ''}"
        )
