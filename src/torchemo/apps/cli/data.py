"""``torchemo data``: which image sets there are, whether one fits, and packing one for quick use."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, final

import tyro

from torchemo.apps.cli.stream import ShowStream
from torchemo.core.errors import LEFT_OUT, ConfigError, DataError
from torchemo.report.terminal import LISTED, counted, print_json, print_table, printable, say

if TYPE_CHECKING:
    from torchemo.data.check import CheckReport
    from torchemo.data.listing import Listing, Progress
    from torchemo.data.packed import PackReport

Source: TypeAlias = Annotated[Path, tyro.conf.arg(metavar="PATH")]


@final
@dataclass(frozen=True)
class ListSets:
    """List the embedded tasks and the image sets under a folder."""

    data: Path | None = None
    """Folder of image sets, or one image set; TORCHEMO_DATA by default."""
    json: bool = False
    """Print the list as JSON."""

    def run(self) -> int:
        """Run the command."""
        given = self.data or os.environ.get("TORCHEMO_DATA")
        found = [*_embedded(), *([] if not given else _below(Path(given)))]
        if self.json:
            print_json(found)
            return 0
        columns = ["source", "form", "classes", "train / val / test", "images"]
        print_table("Where tasks can come from", columns, [_listed(one) for one in found])
        if not given:
            say("Image sets of yours: torchemo data list --data FOLDER, or set TORCHEMO_DATA.")
        return 0


@final
@dataclass(frozen=True)
class CheckSet:
    """Decode every image of a set and say whether tasks can be drawn from it."""

    path: tyro.conf.Positional[Source]
    """Folder of class folders, zip of one, npz, packed set, or a published layout."""
    n_way: Annotated[int, tyro.conf.arg(aliases=["--way"])] = 5
    """Classes of a task, N."""
    n_shot: Annotated[int, tyro.conf.arg(aliases=["--shot"])] = 1
    """Support images per class, K."""
    n_query: int = 15
    """Query images per class."""
    image_size: int | None = None
    """Side at which images are compared for duplicates."""
    splits: Path | None = None
    """A file of class splits, or 64:16:20 to draw them; by default the one with the data, or their own."""
    scheme: str | None = None
    """Which splits to take, where the file holds several."""
    drop_duplicates: bool = False
    """Judge the set with one of images with the same pixels (that of test, else of val)."""
    strict: bool = False
    """Refuse a set with images that cannot be read, as ``train --strict`` does."""
    json: bool = False
    """Print the report as JSON."""

    def run(self) -> int:
        """Run the command; 3 if ``train`` would refuse the set, 7 if it would leave out bad images."""
        from torchemo.data.check import check
        from torchemo.data.episodes import EpisodeSpec
        from torchemo.data.load import splits_for

        spec = EpisodeSpec(self.n_way, self.n_shot, self.n_query)
        (splits,) = splits_for([self.path], file=self.splits, scheme=self.scheme)
        with counted("checking") as progress:
            report = check(
                self.path,
                spec,
                splits=splits,
                image_size=self.image_size,
                drop_duplicates=self.drop_duplicates,
                progress=progress,
            )
        ok = report.ok and not (self.strict and report.bad)
        tasks = f"{self.n_way}-way {self.n_shot}-shot + {self.n_query} query"
        if self.json:
            print_json({"path": str(self.path), "tasks": tasks, "ok": ok, **_plain(report)})
        else:
            _show(report, self.path)
            verdict = "can be drawn" if ok else "do not fit until this is repaired"
            say(f"{'ok' if ok else 'not ok'}: {tasks} tasks {verdict}")
        return DataError.exit_code if not ok else LEFT_OUT if report.bad else 0


@final
@dataclass(frozen=True)
class PackSet:
    """Decode an image set once, or compute its features once, into one file with checksums."""

    path: tyro.conf.Positional[Source]
    """What to pack: any form that ``data check`` reads."""
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """The folder to make."""
    features: str | None = None
    """Pack features of this pretrained network instead: efficientnet-lite0, timm:NAME, torchvision:NAME or
    module:callable. If it is interrupted, the same command continues."""
    weights: str | None = None
    """With --features: file of the network's weights, where they do not come with it."""
    image_size: Annotated[int | None, tyro.conf.arg(aliases=["--size"])] = None
    """Side of the images; the size they have by default, with --features that of the network."""
    channels: Literal[1, 3] | None = None
    """1 for grey, 3 for colour; as the first image by default."""
    strict: bool = False
    """Stop at an image that cannot be read, instead of leaving it out and naming it."""
    splits: Path | None = None
    """A file of class splits, or 64:16:20 to draw them; by default the one with the data, or their own."""
    scheme: str | None = None
    """Which splits to take, where the file holds several."""
    json: bool = False
    """Print what was packed as JSON."""

    def run(self) -> int:
        """Run the command; 7 if bad images were left out."""
        from torchemo.data.load import find, splits_for

        (splits,) = splits_for([self.path], file=self.splits, scheme=self.scheme)
        listing = find(self.path, splits=splits)
        with counted("packing" if self.features is None else "features") as progress:
            report = self._packed(listing, progress)
        if self.json:
            skipped = [bad._asdict() for bad in report.skipped]
            print_json({**report._asdict(), "path": str(report.path), "skipped": skipped})
        else:
            _print_some("left out", [f"{bad.name}: {bad.reason}" for bad in report.skipped])
            what = "images" if self.features is None else f"images seen by {self.features},"
            say(f"{report.path}: {report.images} {what} of {report.classes} classes")
            say(f"train with: torchemo train{self._model()} --data {report.path} --out RUN")
        return LEFT_OUT if report.skipped else 0

    def _packed(self, listing: "Listing", progress: "Progress") -> "PackReport":
        from torchemo.data.packed import pack

        if self.features is None:
            return pack(
                listing,
                self.out,
                image_size=self.image_size,
                channels=self.channels,
                skip_bad=not self.strict,
                progress=progress,
            )

        from torchemo.config.registry import Part
        from torchemo.data.features import pack_features
        from torchemo.models import frozen_network, is_pretrained

        if not is_pretrained(self.features):
            raise ConfigError(
                f"--features {self.features}: this network has no pretrained weights.",
                hint="Take efficientnet-lite0, timm:NAME, torchvision:NAME or module:callable.",
            )
        network = frozen_network(
            Part(self.features, {"size": self.image_size, "weights": self.weights})
        )
        assert network is not None  # noqa: S101 -- is_pretrained says so
        return pack_features(
            listing, self.out, network, skip_bad=not self.strict, progress=progress
        )

    def _model(self) -> str:
        """Write the flags with which a run takes what was packed."""
        if self.features is None:
            return ""
        size = "" if self.image_size is None else f" --size {self.image_size}"
        return f" --preset protonet --model {self.features}{size}"


@final
@dataclass(frozen=True)
class DataCommand:
    """Image sets: list what there is, check one, pack one; show tasks that come back."""

    action: (
        Annotated[ListSets, tyro.conf.subcommand("list")]
        | Annotated[CheckSet, tyro.conf.subcommand("check")]
        | Annotated[PackSet, tyro.conf.subcommand("pack")]
        | Annotated[ShowStream, tyro.conf.subcommand("stream")]
    )

    def run(self) -> int:
        """Run the chosen command."""
        return self.action.run()


# -- list ----------------------------------------------------------------------------------------


def _embedded() -> list[dict[str, Any]]:
    from collections import Counter

    from torchemo.config.run import DataConfig
    from torchemo.data.splits import Proportions, proportional
    from torchemo.data.synthetic.families import WORLDS
    from torchemo.data.synthetic.regression import FAMILIES

    names = [str(c) for c in range(DataConfig().classes_per_family)]
    splits = Counter(
        s for w in WORLDS for s in proportional(names, Proportions(), domain=w).values()
    )
    form = f"embedded synthetic images, {len(WORLDS)} domains"
    found = [_entry("procedural", form, classes=splits.total(), splits=dict(splits))]
    for group, families in FAMILIES.items():
        form = f"embedded regression: {', '.join(family.name for family in families)}"
        found.append(_entry(f"regression:{group}", form))
    return found


def _below(root: Path) -> list[dict[str, Any]]:
    from torchemo.data.listing import SPLIT_FOLDERS
    from torchemo.data.packed import is_packed

    if not root.exists():
        raise DataError(
            f"{root}: there is no such file or folder.", hint="Check --data or TORCHEMO_DATA."
        )
    inside = [] if root.is_file() else sorted(root.iterdir())
    if root.is_file() or is_packed(root) or any(p.name.lower() in SPLIT_FOLDERS for p in inside):
        return [_describe(root)]
    found = [
        _describe(path)
        for path in inside
        if not path.name.startswith(".") and (path.is_dir() or path.suffix in (".zip", ".npz"))
    ]
    # Class folders are no sets of their own: then the folder itself may be one.
    return found if any(one["error"] is None for one in found) else [_describe(root)]


def _describe(path: Path) -> dict[str, Any]:
    from torchemo.data.load import find
    from torchemo.data.splits import SplitFile, schemes_for

    beside = path.parent / "splits.json"
    try:
        schemes = list(schemes_for(beside, data_name=path.name)) if beside.is_file() else []
        splits = SplitFile(beside, schemes[0]) if len(schemes) > 1 else None
        listing = find(path, splits=splits)
    except DataError as error:
        return _entry(str(path), "", error=error.message)
    held = [c.split for c in listing.classes]
    return _entry(
        str(path),
        listing.layout,
        classes=len(held),
        images=listing.total,
        splits={str(split): held.count(split) for split in dict.fromkeys(held)},
        schemes=schemes if len(schemes) > 1 else [],
    )


def _entry(
    source: str,
    form: str,
    *,
    classes: int | None = None,
    images: int | None = None,
    splits: dict[str, int] | None = None,
    schemes: list[str] | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    return {
        "source": source,
        "form": form,
        "classes": classes,
        "images": images,
        "splits": splits or {},
        "schemes": schemes or [],
        "error": error,
    }


def _listed(one: dict[str, Any]) -> list[str]:
    if one["error"] is not None:
        return [one["source"], f"cannot be used: {one['error']}", "", "", ""]
    form = one["form"]
    if one["schemes"]:
        form += f"; splits of '{one['schemes'][0]}', there are {', '.join(one['schemes'])}"
    counts = " / ".join(str(one["splits"].get(split, 0)) for split in ("train", "val", "test"))
    numbers = ("" if one[key] is None else str(one[key]) for key in ("classes", "images"))
    classes, images = numbers
    return [one["source"], form, classes, counts if one["splits"] else "", images or "drawn"]


# -- check ---------------------------------------------------------------------------------------


def _plain(report: "CheckReport") -> dict[str, Any]:
    return {
        "form": report.layout,
        "domains": [domain._asdict() for domain in report.domains],
        "bad": [bad._asdict() for bad in report.bad],
        "small": [small._asdict() for small in report.small],
        "duplicates": [
            {**one._asdict(), "across_splits": one.across_splits} for one in report.duplicates
        ],
        "colliding": [list(names) for names in report.colliding],
        "dropped": report.dropped,
        "problems": list(report.problems),
    }


def _show(report: "CheckReport", path: Path) -> None:
    rows = [
        [
            domain.domain,
            " / ".join(str(domain.classes.get(split, 0)) for split in ("train", "val", "test")),
            str(domain.images),
            f"{domain.smallest} to {domain.largest}",
        ]
        for domain in report.domains
    ]
    columns = ["domain", "classes: train / val / test", "images", "per class"]
    print_table(f"{path}: {report.layout}", columns, rows)
    _print_some("bad image, left out", [f"{bad.name}: {bad.reason}" for bad in report.bad])
    _print_some(
        "small class",
        [f"{s.name} has {s.images} images, {s.needed} are needed" for s in report.small],
    )
    _print_some(
        "in two splits",
        [f"{d.first} ({d.first_split}) and {d.second} ({d.second_split})" for d in report.leaks],
    )
    _print_some("same name", [", ".join(names) for names in report.colliding])
    twice = len([d for d in report.duplicates if not d.across_splits])
    if report.dropped:
        say(f"{report.dropped} copies of other images are dropped")
    elif twice:
        say(f"{twice} {'image is' if twice == 1 else 'images are'} there twice in one split")
    _print_some("problem", list(report.problems))
    if report.leaks:
        say("to leave copies out: --drop-duplicates, here and with train")
    if any(problem.startswith("no class has split") for problem in report.problems):
        say("training needs train, val and test; to draw them from all classes: --splits 64:16:20")


def _print_some(what: str, lines: list[str]) -> None:
    for line in lines[:LISTED]:
        say(f"{what}: {printable(line)}")
    if len(lines) > LISTED:
        say(f"{what}: and {len(lines) - LISTED} more (--json lists all)")
