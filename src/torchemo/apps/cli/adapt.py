"""``torchemo adapt``: a folder of support images and a folder of queries in, predictions out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import tyro

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.core.errors import LEFT_OUT
from torchemo.report.terminal import print_json, print_table, printable, say, say_left_out

if TYPE_CHECKING:
    from torchemo.runs.adapt import Adapted, Answers
    from torchemo.runs.load import Trained


@final
@dataclass(frozen=True)
class AdaptCommand:
    """Adapt a trained run to a few images per class and sort other images by it."""

    run_folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """Folder of the run; its own data are not needed."""
    support: Path
    """Folder or zip with one folder of images per class; any size, colour mode or rotation. A zip that the
    page of ``serve`` saved serves as support and as query."""
    query: Path
    """Folder or zip of images to sort, or one image. No answer depends on the other images."""
    out: Path | None = None
    """Where predictions.json and sheet.html go; RUN/adapted by default."""
    step: int | None = None
    """Checkpoint to use; the best on validation tasks by default."""
    steps: int | None = None
    """Inner steps; those of training by default."""
    invert: bool = False
    """Swap dark and light: for runs on bright ink (Omniglot) and dark ink in the images."""
    strict: bool = False
    """Refuse images that cannot be read, instead of leaving them out."""
    remember: Path | None = None
    """Folder of a store of your own tasks. Classes that come back are recognised by their names, their past
    visits help, and this visit is kept: gradients, class means, names and date, never an image."""
    machine: Machine = CPU_ALONE
    """Where to compute."""
    json: bool = False
    """Print the predictions as JSON."""

    def run(self) -> int:
        """Run the command; 7 if images that cannot be read were left out."""
        from torchemo.report.sheet import sheet
        from torchemo.runs.adapt import query_pictures
        from torchemo.runs.load import load_trained
        from torchemo.runs.storage.durable import replace_file
        from torchemo.training.device import place_of

        trained = load_trained(self.run_folder, step=self.step, place=place_of(self.machine))
        query_pictures(self.query)  # a wrong folder is refused before anything is kept
        adapted = self._adapted(trained)
        answers = adapted.predict(self.query, strict=self.strict)
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
            if self.remember is not None:
                say(f"kept in {self.remember}: gradients and class means of this visit, no image")
            say(f"written: {out / 'predictions.json'}, {out / 'sheet.html'}")
            say_left_out(answers.left_out)
        return LEFT_OUT if answers.left_out else 0

    def _adapted(self, trained: "Trained") -> "Adapted":
        from torchemo.runs.adapt import adapt
        from torchemo.runs.visits.returning import adapt_again, check_steps

        if self.remember is None:
            return adapt(
                trained, self.support, steps=self.steps, invert=self.invert, strict=self.strict
            )
        check_steps(self.steps)
        given = (trained, self.support, self.remember)
        adapted, forgotten = adapt_again(
            *given, run=self.run_folder, invert=self.invert, strict=self.strict
        )
        if forgotten and not self.json:
            say(f"the full store forgot {len(forgotten)} visit: {forgotten[0].when[:10]}")
        return adapted


def _show(answers: "Answers") -> None:
    columns = ["file", "predicted", "probability", "runner-up"]
    rows = [
        [
            p.file,
            p.predicted,
            f"{p.probability:.3f}",
            "" if p.runner_up is None else f"{p.runner_up} {p.runner_up_probability:.3f}",
        ]
        for p in answers.predictions
    ]
    if answers.without is not None and answers.seen is not None and answers.seen.visits:
        columns.append("without past visits")
        for row, p in zip(rows, answers.without, strict=True):
            row.append(f"{p.predicted} {p.probability:.3f}")
    print_table(answers.method, columns, rows)
    if answers.seen is not None:
        say(printable(answers.seen.words))
    if answers.familiar is False:
        say("recall was skipped: these images are unlike the tasks of training")
    if answers.helpful is False:
        say("recall was skipped: the slots for such tasks failed validation")
    if answers.recalled:
        slots = ", ".join(
            f"{one.slot} ({'' if one.domain is None else f'{one.domain}, '}{one.distance:.3f})"
            for one in answers.recalled[:5]
        )
        more = len(answers.recalled) - 5
        say(
            f"recalled slots, with their distance: {slots}{f' and {more} more' if more > 0 else ''}"
        )
