"""Type every command of docs/walkthrough.md again and put what is printed into the page.

python benchmarks/walkthrough.py --data ../shared/data     (a quarter of an hour on an idle machine)

The words between the transcripts are left alone: read them again afterwards. Comparisons are also kept in
benchmarks/results/walkthrough.json.
"""

import argparse
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from torchemo.runs.environment import environment

ROOT = Path(__file__).parent.parent
PAGE, RECORD = ROOT / "docs/walkthrough.md", ROOT / "benchmarks/results/walkthrough.json"
CLASSES = (
    *("Blue_Jay", "Eastern_Towhee", "European_Goldfinch"),
    *("Olive_sided_Flycatcher", "Ring_billed_Gull"),
)
INTERRUPT_AT = 130
PROGRESS = re.compile(r"^[\w ]+: \d+/\d+$")
BLOCK = re.compile(r"(```console\n)(.*?)(```)", re.DOTALL)


def pictures_of_our_own(data, folder):
    """Lay out three images of each class as support, two as queries."""
    (folder / "query").mkdir(parents=True)
    with zipfile.ZipFile(data / "birds84.zip") as source:
        for name in CLASSES:
            (folder / "support" / name).mkdir(parents=True)
            members = sorted(n for n in source.namelist() if n.split("/")[0].endswith(f".{name}"))
            for i, member in enumerate(members[:5]):
                place = folder / "support" / name if i < 3 else folder / "query"
                (place / Path(member).name).write_bytes(source.read(member))


def steps_done(run):
    """Count the outer steps of a run by its log."""
    log = run / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return sum('"event": "step"' in line for line in lines)


def typed(words, folder, *, interrupt=None):
    """Run a command as a user would; return what is printed, without lines of progress."""
    process = subprocess.Popen(  # noqa: S603 -- the commands of our own page
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if interrupt is not None:
        while process.poll() is None and steps_done(interrupt) <= INTERRUPT_AT:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    lines = process.communicate()[0].splitlines()
    if interrupt is not None:
        lines.insert(len(lines) - 1, "^C")
    return [line.rstrip() for line in lines if not PROGRESS.match(line)]


def transcript(block, following, folder):
    """Type the commands of one block."""
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    found = []
    for number, command in enumerate(commands):
        words = shlex.split(command)
        script = [str(Path(sys.executable).parent / "torchemo")] if words[0] == "torchemo" else []
        nexts = [*commands[number + 1 :], *following][:1]
        resumed = bool(nexts) and nexts[0].startswith("torchemo train --resume")
        run = folder / words[words.index("--out") + 1] if resumed else None
        print(command, file=sys.stderr, flush=True)
        shown = typed([*script, *words[len(script) :]], folder, interrupt=run)
        found.append("\n".join([f"$ {command}", *shown]) + "\n")
    return "\n".join(found)


def comparisons(text, folder):
    """Return what `torchemo compare --json` says about the comparisons of the page."""
    names = ("birds", "textures", "omniglot")
    commands = re.findall(r"(?m)^\$ torchemo (compare .+)$", text)
    script = str(Path(sys.executable).parent / "torchemo")
    return {
        name: json.loads(
            subprocess.run(  # noqa: S603 -- the commands of our own page
                [script, *shlex.split(command), "--json"],
                cwd=folder, capture_output=True, text=True, check=True,
            ).stdout
        )[0]
        for name, command in zip(names, commands, strict=True)
    }  # fmt: skip


def main():
    """Make all transcripts anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data.resolve()
    with tempfile.TemporaryDirectory(prefix="torchemo-") as scratch:
        folder = Path(scratch) / "here"
        folder.mkdir()
        (Path(scratch) / "shared").mkdir()
        (Path(scratch) / "shared" / "data").symlink_to(data)
        pictures_of_our_own(data, folder / "mine")
        text = PAGE.read_text()
        blocks = list(BLOCK.finditer(text))
        later = [re.findall(r"(?m)^\$ (.+)$", block[2]) for block in blocks]
        made = []
        for i, block in enumerate(blocks):
            following = [c for commands in later[i + 1 :] for c in commands]
            made.append(block[1] + transcript(block[2], following, folder) + block[3])
        parts = BLOCK.split(text)[::4]
        new = "".join(part + one for part, one in zip(parts, [*made, ""], strict=True))
        what = "comparisons of docs/walkthrough.md, as torchemo compare --json prints them"
        record = {
            "what": what,
            "environment": environment(),
            "comparisons": comparisons(new, folder),
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(new)
        shutil.rmtree(folder / "runs")


if __name__ == "__main__":
    main()
