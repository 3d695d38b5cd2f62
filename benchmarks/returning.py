"""Visit tasks again as a user would, and put what is printed and shown into docs/remember.md.

python benchmarks/returning.py --data ../shared/data     (some minutes; needs Chromium for the screenshots)

Trains ANIL on icons, lays out folders of test classes as visits with new images each time, types the commands
of the page, and opens `torchemo serve --remember` in Chromium for three visits of one task. Accuracy by visit
over several tasks goes into benchmarks/results/returning.json. Icons may be redistributed (docs/data.md).
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import torchemo
from torchemo.core.rng import generator_for
from torchemo.core.stats import mean_interval
from torchemo.runs.environment import environment
from torchemo.runs.experiment import open_tasks

ROOT = Path(__file__).parent.parent
PAGE, RECORD = ROOT / "docs/remember.md", ROOT / "benchmarks/results/returning.json"
SHOTS = ROOT / "docs/figures"
BLOCK = re.compile(r"(```console\n)(.*?)(```)", re.DOTALL)
WAY, VISITS, TASKS, QUERIES = 5, 4, 24, 8
TRAIN = ("anil", "icons32.npz", 600, {"model.filters": 16, "train.validate_every": 200})


def trained(data, out):
    """Train the run of the page, unless it is there."""
    preset, name, steps, options = TRAIN
    if (out / "config.toml").exists():
        return torchemo.load(out)
    given = {"steps": steps, "options": options, "drop_duplicates": True}
    return torchemo.train(preset, data=data / name, out=out, **given)


def lay_out(index, folder, number):
    """Write the images of one task: a folder for each visit, and one of queries, named by class."""
    g = generator_for(number, "visits")
    test = index.classes(split="test")
    for c in test[torch.randperm(len(test), generator=g)[:WAY].numpy()]:
        images = np.flatnonzero(index.label == c)
        images = images[torch.randperm(len(images), generator=g).numpy()]
        name = index.class_names[c]
        for place, image in enumerate(images[: VISITS + QUERIES]):
            kind = f"visit-{place + 1}/{name}" if place < VISITS else "query"
            (folder / kind).mkdir(parents=True, exist_ok=True)
            pixels = index.images[image]
            plane = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
            Image.fromarray(plane).save(folder / kind / f"{name} {place}.png")
    return folder


def right(predictions):
    """Return the share of queries that were taken for the class they are named after, in percent."""
    return (
        100 * sum(p.file.rpartition(" ")[0] == p.predicted for p in predictions) / len(predictions)
    )


def accuracy(run, index, scratch):
    """Visit tasks with a store each; accuracies ``[task, visit]``."""
    with_store, without = [], []
    folders = [lay_out(index, scratch / f"task-{i}", i) for i in range(TASKS)]
    for folder in folders:
        rows = ([], [])
        for v in range(VISITS):
            found = run.adapt(folder / f"visit-{v + 1}", remember=scratch / f"store-{folder.name}")
            answers = found.predict(folder / "query")
            rows[0].append(right(answers.predictions))
            rows[1].append(right(answers.without))
        with_store.append(rows[0])
        without.append(rows[1])
    return np.array(with_store), np.array(without)


def typed(command, folder):
    """Type a command and return what is printed, without lines of progress."""
    words = shlex.split(command)
    script = Path(sys.executable).parent / "torchemo"
    done = subprocess.run(  # noqa: S603 -- the commands of our own page
        [script, *words[1:]], cwd=folder, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    return [line.rstrip() for line in lines if not re.match(r"^[\w ]+: \d+/\d+$", line)]


def transcripts(folder):
    """Type all commands of the page anew."""

    def again(block):
        commands = [line[2:] for line in block[2].splitlines() if line.startswith("$ ")]
        parts = ["\n".join([f"$ {c}", *typed(c, folder)]) + "\n" for c in commands]
        return block[1] + "\n".join(parts) + block[3]

    PAGE.write_text(BLOCK.sub(again, PAGE.read_text()))


def browse(run, folder, scratch):
    """Visit one task three times on the page; return what it said and how many answers were right."""
    from playwright.sync_api import sync_playwright

    server = subprocess.Popen(  # noqa: S603 -- our own command
        [Path(sys.executable).parent / "torchemo", "serve", run.root, "--remember",
         scratch / "page-store", "--json"], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
    seen = []
    try:
        address = json.loads(server.stdout.readline())["address"]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.set_default_timeout(300_000)
            page.goto(address)
            seen.extend(visited(page, folder, v) for v in range(3))
            for width in (1400, 400):
                page.set_viewport_size({"width": width, "height": 900})
                page.wait_for_timeout(300)
                shot = SHOTS / f"remember-{width}.png"
                page.screenshot(path=shot, full_page=True)
                Image.open(shot).quantize(64).save(shot, optimize=True)
            browser.close()
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()
    return seen


def visited(page, folder, v):
    """Teach the images of a visit, ask, remember."""
    from playwright.sync_api import expect

    page.locator(".box").nth(1).wait_for()
    if v:
        page.click("#clear")
        expect(page.locator(".box")).to_have_count(0)
    for number, box in enumerate(sorted((folder / f"visit-{v + 1}").iterdir())):
        if page.locator(".box").count() <= number:
            page.click("#add-class")
            expect(page.locator(".box")).to_have_count(number + 1)
        place = page.locator(".box").nth(number)
        place.locator("input[type=text]").fill(box.name)
        place.locator("input[type=text]").press("Tab")
        place.locator("input[type=file]").set_input_files(sorted(box.iterdir()))
        place.locator("img").wait_for()
        page.locator("#cancel").wait_for(state="hidden")
    queries = sorted((folder / "query").iterdir())[:: QUERIES // 2]
    page.set_input_files("#query-files", queries)
    expect(page.locator(".card")).to_have_count(len(queries), timeout=300_000)
    page.locator("#cancel").wait_for(state="hidden")
    page.click("#answer")
    expect(page.locator(".answer")).to_have_count(len(queries), timeout=300_000)
    names = [f.name.rpartition(" ")[0] for f in queries]
    answers = page.locator(".answer").all_inner_texts()
    said = page.locator("#seen").inner_text()
    page.click("#remember")
    page.locator("#remember-status:has-text('is in the store')").wait_for()
    page.wait_for_timeout(300)
    return {
        "said": said,
        "right": sum(a == n for a, n in zip(answers, names, strict=True)),
        "of": len(names),
    }


def main():
    """Make the record, the transcripts and the screenshots."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="a trained run to use again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchemo-") as place:
        scratch = Path(place)
        here = scratch / "here"
        here.mkdir()
        if given.run is not None:
            shutil.copytree(given.run, here / "runs/icons")
        run = trained(given.data.resolve(), here / "runs/icons")
        index = open_tasks(run.config, needed=("test",)).index
        with_store, without = accuracy(run, index, scratch)
        print(with_store.mean(0), without.mean(0), flush=True)
        gain = mean_interval((with_store[:, -1] - without[:, -1]).tolist())
        own = lay_out(index, here / "mine", 1000)
        page = browse(run, own, scratch)
        for file in sorted((own / "query").iterdir()):
            if not file.name.endswith((f" {VISITS}.png", f" {VISITS + 1}.png")):
                file.unlink()  # two queries of each class fill a screen
        transcripts(here)
    record = {
        "what": "accuracy in percent by visit, one new image per class each time, over tasks of test icons",
        "protocol": {"tasks": TASKS, "way": WAY, "queries": WAY * QUERIES, "train": TRAIN},
        "environment": environment(),
        "with store": with_store.mean(0).round(2).tolist(),
        "without": without.mean(0).round(2).tolist(),
        "gain at the last visit": {k: round(getattr(gain, k), 2) for k in ("value", "low", "high")},
        "page": page,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["with store"]), json.dumps(record["without"]), gain, page)


if __name__ == "__main__":
    main()
