"""Hostile times for a run: kills, stops, full disks, failing calls, clocks, renames, two writers, flips."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

from tests.apps.cli.conftest import MEMORY, POINTS
from tests.attack.harness import SPACE, Case, check, command, kind
from tests.attack.kinds_data import NUMBERS, mutated
from tests.attack.world import copy_of

TRAIN = ("--preset", "maml-emo-paper", *POINTS, *MEMORY, "train.steps=12", "train.validate_every=1")


def fork(words, *, prepare=lambda: None, shown=None) -> int:
    """Run a command in a copy of this process, as the command line does; return its process id."""
    if shown is not None:
        shown.write_bytes(b"")
    child = os.fork()
    if child:
        return child
    try:
        out = os.open(shown or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        prepare()
        from torchemo.apps.cli import main

        code = 0
        try:
            main([str(word) for word in words])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 2
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(99)


def ended(child: int, seconds: float = 400) -> int:
    """Wait for a process; return its exit code, or minus the signal that ended it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    check(False, f"no end within {seconds} seconds")
    return 99


def acknowledged(shown) -> list[int]:
    """Return the steps that a command said it had saved."""
    events = []
    for line in shown.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    return [event["step"] for event in events if event.get("event") == "saved"]


def all_sound(root, *, least: int | None = None) -> None:
    """Check that what is published is whole, and no acknowledged save is lost."""
    from torchemo.runs.storage import checkpoint

    paths = checkpoint.published(root)
    for path in paths:
        checkpoint.verify(path)
    newest = checkpoint.step_of(paths[-1]) if paths else None
    check(least is None or (newest is not None and newest >= least), f"save {least} lost: {newest}")


def survives(case: Case, *, end) -> str:
    """Train, end it somehow, look, and continue."""
    root, shown = case.place / "run", case.place / "shown"
    words = ("train", "--json", "--out", root, *TRAIN)
    for _ in range(case.rng.randrange(1, 4)):
        child = fork(words, shown=shown)
        code = end(child)
        check(code in (0, -9, 130, 143), f"left with {code}: {shown.read_bytes()[-300:]!r}")
        saved = acknowledged(shown)
        if not (root / "config.toml").exists():
            check(not saved, "a run without configuration had saved")
            continue
        all_sound(root, least=max(saved, default=None))
        words = ("train", "--json", "--resume", root)
    code, text = command(*words)
    check(code == 0, f"does not continue: {code} {text[-300:]}")
    all_sound(root, least=12)
    return "saved"


@kind
def kills(case: Case) -> str:
    """The command is killed with SIGKILL at any time, several times in a row."""

    def end(child: int) -> int:
        time.sleep(case.rng.random() ** 2 * 0.8)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        return ended(child)

    return survives(case, end=end)


@kind
def stops(case: Case) -> str:
    """The command gets SIGTERM or Ctrl-C at any time after its first save."""
    number = case.rng.choice((signal.SIGTERM, signal.SIGINT))

    def end(child: int) -> int:
        shown, latest = case.place / "shown", time.monotonic() + 200
        while time.monotonic() < latest and not acknowledged(shown):
            time.sleep(0.01)
        time.sleep(case.rng.random() * 0.3)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
        return ended(child)

    return survives(case, end=end)


@kind
def real_kills(case: Case) -> str:
    """The same for the command as a program of its own, started by the shell's way."""
    root = case.place / "run"
    code = "import sys; from torchemo.apps.cli import main; main(sys.argv[1:])"
    with (case.place / "shown").open("wb") as out:
        words = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            code,
            "train",
            "--json",
            "--out",
            root,
            *TRAIN,
        ]
        process = subprocess.Popen(words, stdout=out, stderr=out)
        latest = time.monotonic() + 400
        while time.monotonic() < latest and not acknowledged(case.place / "shown"):
            time.sleep(0.02)
        time.sleep(case.rng.random())
        process.kill()
        process.wait()
    if (root / "config.toml").exists():
        all_sound(root, least=max(acknowledged(case.place / "shown"), default=None))
        check(command("train", "--resume", root)[0] == 0, "does not continue")
    return "saved"


@kind
def full_disk(case: Case) -> str:
    """No file may grow beyond a size: writes fail in the middle. The run continues when there is room."""
    root, shown, most = case.place / "run", case.place / "shown", int(10 ** case.rng.uniform(2, 5))

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    child = fork(("train", "--out", root, *TRAIN), prepare=limit)
    code = ended(child)
    check(code in (0, 6), f"left with {code} where files have {most} bytes at most")
    words = ("--resume", root) if (root / "config.toml").exists() else ("--out", root, *TRAIN)
    child = fork(("train", *words), shown=shown)
    code = ended(child)
    check(code == 0, f"does not continue: {code} {shown.read_bytes()[-300:]!r}")
    all_sound(root, least=12)
    return "saved"


@kind
def read_only(case: Case) -> str:
    """Any call that opens, makes, renames or syncs fails, once or from then on."""
    root = copy_of(case.world, "points", case.place)
    for path in sorted((root / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    number = case.rng.choice((errno.EACCES, errno.EROFS, errno.EIO, errno.ENOSPC, errno.ESTALE))
    left, lasting = [case.rng.randrange(1, 40)], case.rng.random() < 0.5
    undo = []

    def failing(real):
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] == 0 or (lasting and left[0] < 0):
                raise OSError(number, os.strerror(number), str(arguments[0])[:80])
            return real(*arguments, **options)

        return call

    try:
        for name in ("open", "mkdir", "rename", "replace", "fsync", "unlink"):
            undo.append((name, getattr(os, name)))
            setattr(os, name, failing(getattr(os, name)))
        words = case.rng.choice(
            (("train", "--resume"), ("eval", "--tasks", 2), ("checkpoint", "verify"))
        )
        code, _ = command(words[0], *words[1:2], root, *words[2:]) if words[0] != "eval" else command(
            "eval", root, "--tasks", 2)  # fmt: skip
    finally:
        for name, real in undo:
            setattr(os, name, real)
    check(command("train", "--resume", root)[0] == 0, "does not continue afterwards")
    all_sound(root)
    return "ok" if code == 0 else "refused"


@kind
def clocks(case: Case) -> str:
    """The clock jumps back and forth while a run trains."""
    from torchemo.runs import events

    real, root = time.time, case.place / "run"
    time.time = lambda: real() + case.rng.choice((-1e9, 0, 1e9, -3600, float(2**33)))
    try:
        check(
            command("train", "--out", root, "--preset", "maml", *POINTS)[0] == 0,
            "a clock stopped it",
        )
    finally:
        time.time = real
    steps = [event["step"] for event in events.read(root / "events.jsonl")]
    check(steps == sorted(steps), "events are out of order")
    return "ok"


@kind
def renames(case: Case) -> str:
    """Files and folders of a run are missing, swapped or have other names."""
    root = copy_of(case.world, "points", case.place)
    for _ in range(case.rng.randrange(1, 4)):
        paths = sorted(path for path in root.rglob("*"))
        one, other = case.rng.choice(paths), case.rng.choice(paths)
        if one.exists() and one not in other.parents and other not in one.parents:
            way = case.rng.randrange(3)
            if way == 0:
                name = case.rng.choice(("other", "step-00000002", "step-99999999"))
                other = one.with_name(name + str(case.rng.randrange(3)))
                if not other.exists():
                    one.rename(other)
            elif way == 1 and other.exists() and other != one:
                one.rename(case.place / "x")
                other.rename(one)
                (case.place / "x").rename(other)
            else:
                shutil.rmtree(one) if one.is_dir() else one.unlink()
    codes = [command("eval", root, "--tasks", 2)[0], command("train", "--resume", root)[0]]
    return "ok" if not any(codes) else "refused"


@kind
def two_writers(case: Case) -> str:
    """Two commands continue one run at once: one writes, the other one is told who does."""
    root = copy_of(case.world, "points", case.place)
    for path in sorted((root / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    children = [fork(("train", "--resume", root), shown=case.place / str(i)) for i in range(2)]
    codes = sorted(ended(child) for child in children)
    check(codes in ([0, 0], [0, 6]), f"two writers left with {codes}")
    all_sound(root, least=6)
    return "ok" if codes == [0, 0] else "refused"


@kind
def events(case: Case) -> str:
    """A damaged log: its sound lines are kept, the others are named, and the run continues."""
    from torchemo.runs import events as log

    root = copy_of(case.world, "points", case.place)
    for path in sorted((root / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    file = root / "events.jsonl"
    whole, data = log.read(file), file.read_bytes()
    changed = mutated(case.rng, data)
    file.write_bytes(changed)
    code, shown = command("train", "--resume", root)
    check(code == 0, f"a damaged log stopped it: {shown[-300:]}")
    known = {json.dumps(event) for event in whole}
    first = [event for event in log.read(file) if event["step"] <= 4]
    strangers = [event for event in first if json.dumps(event) not in known]
    check(not strangers, f"an event that never was: {strangers[:1]}")
    lost = sum(event["step"] <= 4 for event in whole) - len(first)
    torn = changed == data[: len(changed)]
    check(lost <= 0 or torn or "damaged" in shown, f"{lost} events vanished without a word")
    return "ok" if changed == data else "refused"


@kind
def flips(case: Case) -> str:
    """One bit of one file of a run is flipped: it is noticed, or nothing that is said changes."""
    root = copy_of(case.world, "points", case.place)
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
    file = case.rng.choice(files)
    data = bytearray(file.read_bytes())
    if not data:
        return "ok"
    data[case.rng.randrange(len(data))] ^= 1 << case.rng.randrange(8)
    file.write_bytes(data)
    code, shown = command("checkpoint", "verify", root)
    inside = "checkpoints" in file.parts
    check(code == 4 or not inside, f"a flip in {file.name} was not noticed: {shown[-200:]}")
    if inside or code:
        return "refused"
    before = command(
        "eval", case.world / "points", "--tasks", 2, "--json", "--out", case.place / "a"
    )[1]
    code, after = command("eval", root, "--tasks", 2, "--json", "--out", case.place / "b")
    if code:
        return "refused"
    one, other = json.loads(before), json.loads(after)
    one.pop("run"), other.pop("run")
    check(one == other, f"a flip in {file.name} changed the result")
    compared, told = command("compare", root, case.world / "points")
    same = command("compare", case.world / "points", case.world / "points")[1]
    check(compared == 3 or told == same, f"a flip in {file.name} changed a comparison")
    resumed, said = command("train", "--resume", root)
    log = file.name in ("events.jsonl", "environment.json") and "damaged" not in said + told
    check(resumed == 0 or compared == 3 or not log, f"a flip in {file.name} went unnoticed")
    return "ok" if compared == 0 else "refused"


@kind
def seals(case: Case) -> str:
    """A checkpoint is changed together with its checksums and its seal."""
    import torch

    from torchemo.runs.storage import checkpoint

    rng, root = case.rng, copy_of(case.world, "points", case.place)
    *older, newest = checkpoint.published(root)
    saved = checkpoint.load(newest)
    groups = {name: dict(group) for name, group in saved.groups.items()}
    info = json.loads(json.dumps(dict(saved.info)))
    for _ in range(rng.randrange(1, 4)):
        if rng.random() < 0.5:
            place = rng.choice((info, info["progress"], info["tasks"]))
            if not isinstance(place, dict) or not place:
                continue
            odd = rng.choice((*NUMBERS, None, "x", [], {}, [1], 1.5, True))
            place[rng.choice((*place, "more"))] = odd
            info.setdefault("progress", {}), info.setdefault("tasks", {})
            info["progress"] = info["progress"] if isinstance(info["progress"], dict) else {}
            info["tasks"] = info["tasks"] if isinstance(info["tasks"], dict) else {}
            continue
        group = groups[rng.choice(tuple(groups))]
        if not group:
            continue
        name = rng.choice(tuple(group))
        tensor = group[name]
        way = rng.randrange(5)
        if way == 0:
            del group[name]
        elif way == 1:
            group[f"odd.{name}"] = tensor
        elif way == 2:
            group[name] = tensor.flatten()[:1].clone()
        elif way == 3:
            group[name] = tensor.to(rng.choice((torch.float64, torch.int64, torch.bool)))
        elif tensor.dtype == torch.int64:
            group[name] = torch.full_like(
                tensor, max(-(2**63), min(2**63 - 1, rng.choice(NUMBERS)))
            )
    for path in (*older, newest):
        shutil.rmtree(path)
    checkpoint.publish(
        root, saved.step, groups=groups, info=info, config_hash=saved.manifest.config_hash
    )
    codes = [command("eval", root, "--tasks", 2)[0], command("memory", "verify", root)[0]]
    child = fork(("train", "--resume", root), prepare=lambda: resource.setrlimit(
        resource.RLIMIT_AS, (SPACE, SPACE)), shown=case.place / "shown")  # fmt: skip
    code = ended(child)
    shown = (case.place / "shown").read_bytes()
    check(
        code in (0, 4, 3) and b"Traceback" not in shown,
        f"resume left with {code}: {shown[-300:]!r}",
    )
    return "ok" if not any((*codes, code)) else "refused"
