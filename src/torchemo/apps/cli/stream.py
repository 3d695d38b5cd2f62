"""``torchemo data stream``: which task comes when, in a stream of tasks that come back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, final

import tyro

from torchemo.report.terminal import print_json, print_table


@final
@dataclass(frozen=True)
class ShowStream:
    """Show a stream: which task comes when, and which classes it has."""

    stream: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")]
    ] = ("pool=10",)
    """Options of data.stream, such as pool=100 law=zipf; `torchemo options data.stream` lists them."""
    data: tuple[str, ...] = ()
    """Image sets (folders, zips, npz), ``procedural`` (the default), or ``regression:hsml4``."""
    splits: Path | None = None
    """A file of class splits."""
    scheme: str | None = None
    """Which splits to take, where the file holds several."""
    split: Literal["train", "val", "test"] = "test"
    """Classes to draw tasks from."""
    way: int | None = None
    """Classes of a task, N."""
    visits: int = 20
    """Visits to show."""
    seed: int = 0
    """Seed of the stream; evaluation has 0."""
    json: bool = False
    """Print the visits as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.data.source import open_stream
        from torchemo.runs.choices import Choices, stream_options

        splits = None if self.splits is None else str(self.splits)
        short = {"splits": splits, "scheme": self.scheme, "way": self.way}
        options = stream_options(self.stream)
        config = Choices(data=self.data, short=short, options=options).resolved().data
        source = open_stream(config, needed=(self.split,))
        visits = source.visits(self.split, seed=self.seed, start=0, count=self.visits)
        names = [source.source.visited.names(visit) for visit in visits]
        if self.json:
            fields = [(v.number, v.task, v.visit) for v in visits]
            keys = ("number", "task", "visit")
            print_json(
                [
                    {**dict(zip(keys, row, strict=True)), "classes": list(classes)}
                    for row, classes in zip(fields, names, strict=True)
                ]
            )
            return 0
        rows = [
            [str(v.number), "once" if v.task < 0 else str(v.task), str(v.visit), ", ".join(classes)]
            for v, classes in zip(visits, names, strict=True)
        ]
        title = f"tasks of split {self.split}: {', '.join(self.stream)}"
        print_table(title, ["visit", "task", "seen before", "classes"], rows)
        return 0
