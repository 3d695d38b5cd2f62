"""Hostile data: archives, images, arrays, pickles, MATLAB files, names, options, pages and requests."""

import io
import json
import os
import pickle
import zipfile
from contextlib import suppress
from functools import cache

import numpy as np
from PIL import Image

from tests.attack.harness import Case, check, command, kind
from tests.attack.world import copy_of

NASTY = (
    *("../up", "/etc/passwd", "a/../../b", "C:\\x", "con", ".", "..", "a\0b", "\x1b[2J", "\u202egnp"),
    *("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{7*7}}", "%s%n", "caf\u00e9"),
    *("cafe\u0301", "new\nline", "tab\t", "'; drop", "x" * 200, " ", "-rf", "=cmd()", "__MACOSX", "a.zip"),
)  # fmt: skip
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    -128,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    -(2**63),
    10**30,
)


def refusal(action) -> str:
    """Do something that may be refused by name, and in no other way."""
    from torchemo.core.errors import TorchemoError

    try:
        action()
    except TorchemoError as error:
        check(error.exit_code in (2, 3, 4, 6), f"code {error.exit_code} for {error.message:.100}")
        check(len(str(error)) < 5000, f"a message of {len(str(error))} characters")
        return "refused"
    return "ok"


def mutated(rng, data: bytes) -> bytes:
    """Flip, cut, repeat, overwrite or swap parts of some bytes."""
    data = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(data) + 1)
        way = rng.randrange(6)
        if way == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            del data[at:]
        elif way == 2:
            data[at:at] = data[at : at + rng.randrange(64)] * rng.randrange(1, 9)
        elif way == 3:
            data[at : at + 8] = rng.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * rng.choice(
                (1, 4, 8)
            )
        elif way == 4:
            del data[at : at + rng.randrange(1, 64)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 32))
    return bytes(data)


def png(rng) -> bytes:
    """An image in one of the formats that are read."""
    mode = rng.choice(("RGB", "L", "P", "RGBA", "1", "CMYK", "I;16", "LA"))
    size = rng.choice(((16, 16), (16, 16), (1, 1), (4, 4), (3, 300), (64, 8)))
    form = rng.choice(("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"))
    stream = io.BytesIO()
    try:
        Image.new(mode, size).save(stream, form)
    except (OSError, ValueError, KeyError):
        Image.new("RGB", size, (9, 9, 9)).save(stream, "PNG")
    return stream.getvalue()


@kind
def archives(case: Case) -> str:
    """Zip archives with hostile names, links, sizes and directories."""
    from torchemo.data.load import load

    rng, path = case.rng, case.place / "set.zip"
    with suppress(ValueError, UnicodeError), zipfile.ZipFile(path, "w") as archive:
        for i in range(rng.randrange(12)):
            name = f"{rng.choice(('a', 'b', *NASTY))}/{rng.choice((f'{i}', *NASTY))}.png"
            member = zipfile.ZipInfo(rng.choice((name, f"a/{i}.png")))
            member.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            member.external_attr = rng.choice((0, 0o100644, 0o120777, 0o060000)) << 16
            content = rng.choice(
                (png(rng), b"\0" * rng.choice((0, 1 << 20)), mutated(rng, png(rng)))
            )
            archive.writestr(member, content)
    path.write_bytes(mutated(rng, path.read_bytes()) if rng.random() < 0.6 else path.read_bytes())
    ended = refusal(lambda: load(path, image_size=8, channels=3, on_bad=lambda bad: None))
    check(os.listdir(case.place) == ["set.zip"], "something was unpacked")
    return ended


@kind
def images(case: Case) -> str:
    """Images of all formats and modes, damaged, beside good ones."""
    from torchemo.data.load import load

    for split in ("train", "val", "test"):
        for i in range(3):
            place = case.place / "set" / split / f"class {split}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{i}.png").write_bytes(mutated(case.rng, png(case.rng)))
    return refusal(
        lambda: load(case.place / "set", image_size=8, channels=3, on_bad=lambda bad: None)
    )


@kind
def npz(case: Case) -> str:
    """Arrays of any type and shape under the names that are read, with headers that lie."""
    from torchemo.data.load import load

    rng, path, n = case.rng, case.place / "set.npz", case.rng.choice((0, 1, 4, 9))
    types = (np.uint8, np.int64, np.uint64, np.int8, np.float64, np.float16, bool, np.complex64)
    arrays = {
        "images": np.zeros(rng.choice(((n, 8, 8, 3), (n, 3, 8, 8), (n, 8, 8), (n,), (), (n, 0, 8))),
                           rng.choice((np.uint8, np.uint8, *types))),
        "label": np.zeros(rng.choice(((n,), (n,), (), (n, 1), (n + 1,))), rng.choice(types)),
    }  # fmt: skip
    if rng.random() < 0.7:
        value = rng.choice(NUMBERS)
        with suppress(OverflowError, IndexError, TypeError, ValueError):
            arrays["label"].flat[rng.randrange(n + 1)] = value
    for name in ("class_names", "class_split", "class_domain", "class_alphabet", "class_character"):
        if rng.random() < 0.3:
            words = [rng.choice((*NASTY, "train", "val", "test")) for _ in range(rng.randrange(5))]
            arrays[name] = np.array(words if rng.random() < 0.8 else rng.choice(NUMBERS))
    try:
        np.savez(path, **{name: array for name, array in arrays.items() if array.dtype != object})
    except ValueError:
        path.write_bytes(b"")
    if rng.random() < 0.5:
        header = f"{{'descr': '{rng.choice(('<U0', '|u1', '<f8', '|O', '<U9'))}', 'fortran_order': False,"
        header += f" 'shape': ({rng.choice(NUMBERS)}, {rng.choice(NUMBERS)}), }}\n"
        lie = (
            b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0" * 64
        )
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path, "a") as archive:
            archive.writestr(rng.choice(("class_names.npy", "junk.npy", "labels.npy")), lie)
    if rng.random() < 0.4:
        path.write_bytes(mutated(rng, path.read_bytes()))
    return refusal(lambda: load(path, image_size=8, channels=3, on_bad=lambda bad: None))


class Runs:
    """Makes a folder when it is unpickled by somebody careless."""

    def __init__(self, canary) -> None:
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def structure(rng, depth: int = 0):
    """Containers that share their parts, with numbers and texts of any size."""
    if depth > 5 or rng.random() < 0.3:
        leaves = (rng.choice(NUMBERS), "x" * rng.choice((0, 9, 9999)), b"y" * 9, None, 1.5, True)
        return rng.choice(
            (*leaves, np.zeros(rng.randrange(9), rng.choice(("u1", "f4", "i8", "U3"))))
        )
    part = structure(rng, depth + 1)
    for _ in range(rng.choice((0, 0, 1, 24, 30))):
        part = rng.choice((lambda p: [p, p], lambda p: (p, p), lambda p: {1: p, "a": p}))(part)
    rest = [structure(rng, depth + 1) for _ in range(rng.randrange(3))]
    return rng.choice(([part, *rest], (part, *rest), {"data": part, "labels": rest}))


@kind
def pickles(case: Case) -> str:
    """Pickles: plain, shared without end, of code, of random instructions, damaged."""
    from torchemo.data.formats.pickles import read_pickle

    rng, path, canary = case.rng, case.place / "set.pkl", case.place / "canary"
    way = rng.randrange(3)
    if way == 0:
        content = pickle.dumps([structure(rng), Runs(canary)] if rng.random() < 0.3 else structure(rng),
                               rng.randrange(6))  # fmt: skip
    elif way == 1:
        codes = b"(.0Ndlt}])\x85\x86\x87aesuRbK\x01K\x02q\x00h\x00p0\ng0\n\x94\x8c\x01a\x93cos\nmkdir\nVx\n"
        content = bytes(rng.choice(codes) for _ in range(rng.randrange(1, 200))) + b"."
    else:
        content = mutated(
            rng, pickle.dumps({"data": np.zeros((3, 4, 4, 3), "u1"), "labels": [0, 1, 2]})
        )
    path.write_bytes(mutated(rng, content) if rng.random() < 0.3 else content)
    ended = refusal(lambda: read_pickle(path))
    check(not canary.exists(), "code of a pickle was run")
    return ended


@kind
def matlab(case: Case) -> str:
    """MATLAB files of labels, damaged or with numbers that are no labels."""
    import scipy.io

    from torchemo.data.load import find

    rng, root = case.rng, case.place / "flowers"
    (root / "jpg").mkdir(parents=True)
    for i in range(3):
        (root / "jpg" / f"image_{i}.jpg").write_bytes(b"")
    values = rng.choice((np.array([[1, 2, 3]]), np.array([[1, np.nan, np.inf]]), np.zeros((2, 2)),
                         np.array([["a"]]), np.array([[float(rng.choice(NUMBERS)), 1, 2]])))  # fmt: skip
    file = root / "imagelabels.mat"
    scipy.io.savemat(file, {"labels": values}, do_compression=rng.random() < 0.5)
    file.write_bytes(mutated(rng, file.read_bytes()))
    return refusal(lambda: find(root))


@kind
def names(case: Case) -> str:
    """Folders and files with names that mean something to a terminal, a shell or a file system."""
    rng = case.rng
    for split in rng.choice((("train", "val", "test"), ("",))):
        for _ in range(3):
            name = rng.choice(NASTY).replace("/", "_").replace("\0", "_") + str(rng.randrange(9))
            place = case.place / "set" / split / name
            with suppress(OSError):
                place.mkdir(parents=True)
                (place / f"{name[:50]}.png").write_bytes(png(rng))
                if rng.random() < 0.3:
                    (place / "link").symlink_to(rng.choice((".", "..", "nowhere", "/dev")))
    code, _ = command("data", "check", case.place / "set", codes={0, 2, 3, 7})
    return "ok" if code in (0, 7) else "refused"


@kind
def options(case: Case) -> str:
    """One option of a preset has a value that cannot work, or that nobody expects."""
    from torchemo.config.presets import names as presets
    from torchemo.config.toml import to_dict
    from torchemo.core.errors import TorchemoError
    from torchemo.runs.choices import Choices
    from torchemo.runs.experiment import complete, open_experiment

    rng, name = case.rng, case.rng.choice(presets())
    data = rng.choice((("regression:hsml4",), ("procedural",)))
    small = ["train.steps=2", "train.tasks=1", "train.validation_tasks=1", "data.n_query=2"]
    small += ["data.image_size=16", "data.classes_per_family=20"] if data[0] == "procedural" else []

    def plain(*more):
        return Choices(name, None, data, {}, (*small, *more)).resolved()

    def leaves(table, path=""):
        for key, value in table.items():
            yield from leaves(value, f"{path}{key}.") if isinstance(value, dict) else [path + key]

    try:
        known = list(leaves(to_dict(complete(plain()))))
    except TorchemoError:
        return "refused"
    bad = (
        "-1",
        "0",
        "-0.5",
        "nan",
        "inf",
        "1e-300",
        "1e300",
        "2",
        "true",
        '"x"',
        "[]",
        "[0]",
        "[-1]",
        "1.5",
    )
    option = rng.choice(known)
    if option in ("train.steps", "memory.steps"):
        return "ok"

    def train() -> None:
        made = open_experiment(plain(f"{option}={rng.choice(bad)}"))
        made.trainer.step(made.source.sample("train", seed=0, start=0, count=1))

    try:
        return refusal(train)
    except AssertionError:  # training that diverged is named, too
        return "refused"


@kind
def toml(case: Case) -> str:
    """A config.toml that was damaged: refused, or it still says the same."""
    from torchemo.config.toml import to_dict
    from torchemo.runs.load import read_config

    root = copy_of(case.world, "points", case.place)
    file = root / "config.toml"
    before = to_dict(read_config(root))
    file.write_bytes(mutated(case.rng, file.read_bytes()))
    code, _ = command("checkpoint", "verify", root, codes={0, 2, 4})
    if code:
        return "refused"
    after = to_dict(read_config(root))  # an option that is missing has its default
    for table in (before, after):
        for place in ("source", "splits"):
            table["data"].pop(place, None)
    check(before == after, "another configuration was taken for the same")
    return "ok"


@kind
def results(case: Case) -> str:
    """A result that was damaged: refused, or it still says the same."""
    root = copy_of(case.world, "points", case.place)
    file = root / "eval-test-standard.json"
    before = json.loads(file.read_text())
    file.write_bytes(mutated(case.rng, file.read_bytes()))
    code, _ = command("compare", root, case.world / "points", codes={0, 3})
    if code:
        return "refused"
    after = json.loads(file.read_text())
    before.pop("sha256")
    after.pop("sha256", None)
    check(after.items() >= before.items(), "a changed result was taken for the same")
    return "ok"


@kind
def html(case: Case) -> str:
    """Names of classes and images on the page of answers: nothing of them becomes markup."""
    rng, folder = case.rng, case.place / "mine"
    payload = rng.choice(
        (
            "<script>alert(1)</script>",
            "<img src=x onerror=alert(1)>",
            "{{7*7}}",
            "<b>x",
            "a' onload='x",
            'a" onload="x',
            "</style><script>",
            "<!--",
            "&#60;script&#62;",
        )
    )
    for i in range(2):
        place = folder / f"{payload.replace('/', '_')}{i}"
        place.mkdir(parents=True)
        for j in range(2):
            Image.new("RGB", (16, 16), (100 * i, 50, 50 * j)).save(
                place / f"{payload.replace('/', '_')}{j}.png"
            )
    query, out = next(iter(sorted(folder.iterdir()))), case.place / "out"
    code, _ = command(
        "adapt", case.world / "pictures", "--support", folder, "--query", query, "--out", out
    )
    if code not in (0, 7):
        return "refused"
    page = (out / "sheet.html").read_text()
    check(payload.replace("/", "_") not in page or ("<" not in payload and '"' not in payload
          and "'" not in payload), f"{payload!r} stands in the page as it is")  # fmt: skip
    return "ok"


@cache
def _client(world):
    from tests.apps.web.conftest import Client
    from torchemo.apps.web.answering import Answering
    from torchemo.apps.web.app import build_app
    from torchemo.apps.web.session import Limits
    from torchemo.runs.run import load as load_run

    return Client(
        build_app(Answering(load_run(world / "pictures")), token="t", limits=Limits()), token="t"
    )


@kind
def requests(case: Case) -> str:
    """Requests to the page: any verb, path and body; no answer is an internal error."""
    client, rng = _client(case.world), case.rng
    session = client("POST", "/api/sessions").json.get("session", "none")
    paths = (
        "/",
        "/api/sessions",
        f"/api/sessions/{session}",
        f"/api/sessions/{session}/do",
        f"/api/sessions/{session}/images?box=1&name=a",
        "/../../etc/passwd",
        "/api/sessions/%2e%2e",
    )
    for _ in range(8):
        body = rng.choice(
            (
                b"",
                rng.randbytes(40),
                png(rng),
                b"[" * 10_000,
                json.dumps(
                    {
                        "action": rng.choice(("add_class", "answer", "remove", "rename", *NASTY)),
                        "name": rng.choice((*NASTY, *NUMBERS)),
                        "box": rng.choice(NUMBERS),
                    },
                    default=str,
                ).encode(),
            )
        )
        path = rng.choice(paths) + rng.choice(("", "", "?x=1", "/..", "?name=%00"))
        verb = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "QUERY"))
        reply = client(verb, path, body, host=rng.choice((b"127.0.0.1", b"evil.example", b"")))
        check(reply.status < 500, f"{verb} {path}: {reply.status}")
        check(b"Traceback" not in reply.body, f"{verb} {path}: a traceback")
    return "ok"
