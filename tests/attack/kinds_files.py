"""Hostile files of a run and of a store: tensors, JSON with fitting seals, visits, damaged exports."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path

from tests.attack.harness import Case, check, command, kind
from tests.attack.kinds_data import NASTY, NUMBERS, mutated, refusal
from tests.attack.kinds_runs import ended, fork
from tests.attack.world import copy_of

ODD = (*NUMBERS, *NASTY, None, True, 1.5, -0.0, 1e308, [], {}, [[]], [1], ["a"], {"a": 1}, 10**400)


def odd_json(rng: random.Random, body, depth: int = 0):
    """Return JSON with one or more of its values, names or lengths changed."""
    if isinstance(body, dict) and body and (depth == 0 or rng.random() < 0.8):
        name = rng.choice(tuple(body))
        way = rng.randrange(8)
        if way == 0:
            return {key: value for key, value in body.items() if key != name}
        if way == 1:
            return {**body, str(rng.choice(NASTY)): rng.choice(ODD)}
        return {**body, name: odd_json(rng, body[name], depth + 1)}
    if isinstance(body, list) and body and rng.random() < 0.7:
        at = rng.randrange(len(body))
        way = rng.randrange(4)
        if way == 0:
            return body[:at]
        if way == 1:
            return [*body, *body[at:]]
        return [*body[:at], odd_json(rng, body[at], depth + 1), *body[at + 1 :]]
    return rng.choice(ODD)


@kind
def json_files(case: Case) -> str:
    """JSON of a run is changed together with its digest or seal: no command shows its insides."""
    from torchemo.runs.storage import checkpoint
    from torchemo.runs.storage.seal import seal, with_digest

    rng, root = case.rng, copy_of(case.world, "points", case.place)
    newest = checkpoint.published(root)[-1]
    file = rng.choice(
        (newest / "manifest.json", root / "eval-test-standard.json", root / "environment.json")
    )
    body = json.loads(file.read_text())
    for name in ("seal", "sha256"):
        body.pop(name, None)
    for _ in range(rng.randrange(1, 4)):
        body = odd_json(rng, body)
        body = body if isinstance(body, dict) and body else {"a": body}
    file.write_bytes(
        seal(body) if file.name == "manifest.json" else json.dumps(with_digest(body)).encode()
    )
    words = {
        "manifest.json": (
            ("checkpoint", "list", root),
            ("checkpoint", "verify", root),
            ("eval", root, "--tasks", 2),
            ("memory", "verify", root),
        ),
        "eval-test-standard.json": (
            ("compare", root, case.world / "points"),
            ("compare", case.world / "points", root, "--json"),
        ),
        "environment.json": (),
    }
    codes = [command(*one)[0] for one in words[file.name]]
    codes.append(command("train", "--resume", root)[0])
    return "refused" if any(codes) else "ok"


@kind
def safetensors(case: Case) -> str:
    """A file of tensors has another header, and the manifest vouches for it."""
    from torchemo.runs.storage import checkpoint
    from torchemo.runs.storage.manifest import FileEntry

    rng, root = case.rng, copy_of(case.world, "points", case.place)
    *older, newest = checkpoint.published(root)
    for path in older:
        shutil.rmtree(path)
    manifest = checkpoint.read_manifest(newest)
    progress = {**manifest.info["progress"], "best_step": manifest.step}
    manifest = replace(manifest, info={**manifest.info, "progress": progress})
    group = rng.choice(tuple(manifest.groups))
    file = newest / f"{group}.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if rng.random() < 0.7:
        for _ in range(rng.randrange(1, 3)):
            header = odd_json(rng, header)
        text = json.dumps(header).encode()
        if rng.random() < 0.2:
            text = text[:-1] + b"," + text[1:] if len(text) > 2 else text  # every name twice
        length = rng.choice((len(text), len(text), len(text), *NUMBERS))
        content = struct.pack("<Q", length % 2**64) + text + data[8 + size :]
    else:
        content = mutated(rng, data)
    file.write_bytes(content)
    entry = manifest.groups[group]
    tensors = odd_json(rng, dict(entry.tensors)) if rng.random() < 0.3 else entry.tensors
    if not isinstance(tensors, dict) or not all(isinstance(t, str) for t in tensors.values()):
        tensors = entry.tensors
    entry = FileEntry(len(content), hashlib.sha256(content).hexdigest(), tensors)
    groups = {**manifest.groups, group: entry}
    (newest / "manifest.json").write_bytes(replace(manifest, groups=groups).to_bytes())
    began = time.monotonic()
    ended = refusal(lambda: checkpoint.load(newest))
    check(time.monotonic() - began < 30, "a small file took long to read")
    code, _ = command("eval", root, "--tasks", 2)
    check(code == 0 or ended == "refused" or code == 4, f"left with {code}")
    return "refused" if code else "ok"


def copy_of_store(case: Case) -> Path:
    """Copy the store of visits to where a case may damage it."""
    return Path(shutil.copytree(case.world / "store", case.place / "store"))


def files_of(root: Path) -> list[Path]:
    """Return all files of a store that mean something."""
    own = (".lock", ".owner")
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name not in own)


@kind
def stores(case: Case) -> str:
    """A store of visits, in its folder or exported, is damaged: refused, or it says the same."""
    rng, root = case.rng, copy_of_store(case)
    whole = command("memory", "list", case.world / "store", "--json")[1]
    exported = rng.random() < 0.3
    if exported:
        out = case.place / "store.zip"
        command("memory", "export", root, out, codes={0})
        out.write_bytes(mutated(rng, out.read_bytes()))
        target = out
    else:
        target, file = root, rng.choice(files_of(root))
        way = rng.randrange(4)
        if way == 0:
            file.unlink()
        elif way == 1:
            other = rng.choice(files_of(root))
            one, two = file.read_bytes(), other.read_bytes()
            file.write_bytes(two), other.write_bytes(one)
        else:
            file.write_bytes(mutated(rng, file.read_bytes()))
    before = {path: path.read_bytes() for path in files_of(case.world / "store")}
    same = not exported and all(
        (root / path.relative_to(case.world / "store")).is_file()
        and (root / path.relative_to(case.world / "store")).read_bytes() == data
        for path, data in before.items()
    )
    code, _ = command("memory", "verify", target)
    check(same or exported or code in (2, 4), f"damage was not noticed: {code}")
    listed, shown = command("memory", "list", target, "--json")
    if code == 0 and listed == 0:
        one, other = json.loads(whole), json.loads(shown)
        for found in (one, other):
            found.pop("store", None), found.pop("path", None)
        check(one == other, "a damaged store says something else")
    command("memory", "merge", case.place / "new", target, codes={0, 2, 4})
    visit = ("adapt", case.world / "plain", "--support", case.world / "visit",
             "--query", case.world / "visit" / "black", "--remember", root,
             "--out", case.place / "out")  # fmt: skip
    command(*visit)
    return "ok" if code == 0 else "refused"


@kind
def sealed_stores(case: Case) -> str:
    """The index of a store is changed together with its seal."""
    from torchemo.runs.storage.seal import seal

    rng, root = case.rng, copy_of_store(case)
    body = json.loads((root / "store.json").read_text())
    body.pop("seal")
    for _ in range(rng.randrange(1, 3)):
        body = odd_json(rng, body)
        body = body if isinstance(body, dict) and body else {"a": body}
    (root / "store.json").write_bytes(seal(body))
    codes = [command("memory", word, root)[0] for word in ("list", "verify")]
    visit = ("adapt", case.world / "plain", "--support", case.world / "visit",
             "--query", case.world / "visit" / "black", "--remember", root,
             "--out", case.place / "out")  # fmt: skip
    codes.append(command(*visit)[0])
    codes.append(command("memory", "forget", root, "--everything")[0])
    return "refused" if any(codes) else "ok"


@kind
def store_kills(case: Case) -> str:
    """Visits are kept and forgotten until the command is killed, again and again."""
    from torchemo.runs.visits.store import reading

    rng, root = case.rng, copy_of_store(case)
    shown = case.place / "shown"
    for number in range(rng.randrange(1, 5)):
        support = case.place / f"visit-{number}"
        for name in ("black", "white"):
            (support / name).mkdir(parents=True)
            (support / name / "a.png").write_bytes(_plain(rng))
        known = {visit.id for visit in reading(root).index.visits}
        way = rng.randrange(3)
        words = {
            0: ("memory", "forget", root, "--visits", min(known, default="")),
            1: ("memory", "rename", root, "black", f"black{number}"),
            2: ("adapt", case.world / "plain", "--support", support, "--query",
                support / "black", "--remember", root, "--out", case.place / "out"),
        }[way if known else 2]  # fmt: skip
        child = fork(words, shown=shown)
        time.sleep(rng.random() ** 2 * 0.4)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
        code = ended(child)
        check(code in (0, 2, -9), f"left with {code}: {shown.read_bytes()[-300:]!r}")
        store = reading(root)
        check(not store.faults(), f"torn: {store.faults()[:1]}")
        now = {visit.id for visit in store.index.visits}
        said = b"kept in" in shown.read_bytes() or b"forgot" in shown.read_bytes().lower()
        check(not said or way == 1 or now != known, "what was said to be done is not")
        check(len(now ^ known) <= 1, "visits vanished")
    code, text = command("memory", "verify", root)
    check(code == 0, f"the store is damaged: {text[-200:]}")
    return "saved"


def _plain(rng: random.Random) -> bytes:
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (16, 16), tuple(rng.randrange(256) for _ in range(3))).save(out, "PNG")
    return out.getvalue()


@kind
def lines(case: Case) -> str:
    """The lines of a log are damaged, lost, doubled or moved: no event appears or vanishes silently."""
    from torchemo.core.errors import DataError
    from torchemo.runs import events as log
    from torchemo.runs.storage.seal import with_digest

    rng, file = case.rng, case.place / "events.jsonl"
    (case.place / "environment.json").write_text(json.dumps(with_digest({"of": "today"})))
    with log.EventLog(log.JsonLines(file), clock=rng.random) as out:
        for step in range(rng.randrange(1, 9)):
            text = rng.choice((*NASTY, *NUMBERS))
            out.emit(rng.choice(("step", "validation")), step, fields={"value": text})
    whole, last, data = log.read(file), step, file.read_bytes()
    rows = mutated(rng, data).splitlines(keepends=True)
    way, at = rng.randrange(6), rng.randrange(len(rows) or 1)
    if rows and way == 0:
        del rows[at]
    elif rows and way == 1:
        rows.insert(rng.randrange(len(rows)), rows[at])
    elif rows and way == 2:
        rows.append(rows.pop(at))
    file.write_bytes(b"".join(rows))
    try:
        found = log.read(file)
        check(found == whole[: len(found)], "other events were read without a word")
    except DataError:
        found = None
    cut = log.truncate_after(file, last)
    left = log.read(file)
    check(all(event in whole for event in left), "an event that never was")
    said = cut.damaged or cut.gaps or cut.last != last
    check(left == whole or bool(said), "events vanished without a word")
    return "ok" if left == whole else "refused"
