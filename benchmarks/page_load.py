"""Measure the page under load: 200 queries of 224 pixels through a pretrained network.

python benchmarks/page_load.py            (two minutes on one core; needs the extras web and pretrained)

Trains a head on EfficientNet-Lite0 for two steps on images of rectangles, starts `torchemo serve` on it,
sends five classes of five images and 200 queries over HTTP, waits for the answers, and writes time and
memory of the server's processes to benchmarks/results/page_load.json. Fails where a bound is not kept.
"""

import argparse
import io
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

import torchemo
from torchemo.runs.environment import environment

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks/results/page_load.json"
SIDE, CLASSES, SHOTS, QUERIES = 224, 5, 5, 200
LONGEST, LARGEST = 300.0, 2.0
"""Bounds: CPU seconds of the server for all 200 answers, and GB of memory."""


def picture(seed):
    """Return a JPEG of 224 pixels: a few random rectangles."""
    draw = np.random.default_rng(seed)
    pixels = np.full((SIDE, SIDE, 3), draw.integers(0, 256, 3), dtype=np.uint8)
    for _ in range(6):
        (top, bottom), (left, right) = (sorted(draw.integers(0, SIDE, 2)) for _ in range(2))
        pixels[top:bottom, left:right] = draw.integers(0, 256, 3)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=90)
    return stream.getvalue()


class Server:
    """`torchemo serve` in a process of its own, with what it takes."""

    def __init__(self, run):
        words = [sys.executable, "-m", "torchemo", "serve", str(run), "--json"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self.address = json.loads(self.process.stdout.readline())["address"]
        self.peak, self._over = 0, threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()

    def _all(self):
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def _look(self):
        while not self._over.wait(0.05):
            try:
                self.peak = max(self.peak, sum(p.memory_info().rss for p in self._all()))
            except psutil.NoSuchProcess:
                continue

    @property
    def cpu(self):
        """CPU seconds of all its processes."""
        return sum(sum(p.cpu_times()[:2]) for p in self._all())

    def __call__(self, verb, path, body=None):
        """Send a request and return what is answered."""
        asked = urllib.request.Request(self.address + path, body, method=verb)  # noqa: S310
        with urllib.request.urlopen(asked, timeout=120) as reply:  # noqa: S310
            return json.loads(reply.read())

    def close(self):
        """End it."""
        self._over.set()
        self._watch.join()
        self.process.terminate()
        self.process.wait()


def trained(folder):
    """Train a head on EfficientNet-Lite0 for two steps on images of rectangles."""
    for number, split in enumerate(("train", "val", "test")):
        for c in range(CLASSES):
            place = folder / "images" / split / f"{split} {c}"
            place.mkdir(parents=True)
            for i in range(2):
                (place / f"{i}.jpg").write_bytes(picture(10_000 * number + 100 * c + i))
    options = {"model.name": "efficientnet-lite0", "data.n_query": 1, "train.tasks": 2}
    torchemo.train("anil", data=folder / "images", out=folder / "run", steps=2, options=options)
    return folder / "run"


def measured(run):
    """Teach five classes, ask 200 queries, and return what it took."""
    server = Server(run)
    try:
        session = "api/sessions/" + server("POST", "api/sessions")["session"]
        act = lambda **what: server("POST", f"{session}/do", json.dumps(what).encode())  # noqa: E731
        began = time.perf_counter()
        for c in range(CLASSES):
            key = act(action="add_class", name=f"class {c}")["boxes"][-1]["key"]
            for i in range(SHOTS):
                image = picture(100 * c + i)
                server("POST", f"{session}/images?box={key}&name={c}-{i}.jpg", image)
        for i in range(QUERIES):
            server("POST", f"{session}/images?name=query-{i}.jpg", picture(1000 + i))
        sent, cpu = time.perf_counter(), server.cpu
        act(action="answer")
        while (state := server("GET", session))["job"]["running"]:
            time.sleep(0.1)
        done = time.perf_counter()
        answered = sum(query["answer"] is not None for query in state["queries"])
        return {
            "answered": answered,
            "seconds_to_send": round(sent - began, 1),
            "seconds_to_answer": round(done - sent, 1),
            "cpu_seconds_to_answer": round(server.cpu - cpu, 1),
            "memory_peak_gb": round(server.peak / 1e9, 2),
        }
    finally:
        server.close()


def main():
    """Measure, check the bounds, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(trained(Path(folder)))
    what = (
        f"{CLASSES} classes of {SHOTS} images, {QUERIES} queries of {SIDE} px, efficientnet-lite0"
    )
    given.out.write_text(
        json.dumps({"what": what, **found, "environment": environment()}, indent=1) + "\n"
    )
    print(json.dumps(found))
    if found["answered"] < QUERIES:
        sys.exit(f"only {found['answered']} of {QUERIES} queries were answered")
    if found["cpu_seconds_to_answer"] > LONGEST or found["memory_peak_gb"] > LARGEST:
        sys.exit(f"more than {LONGEST} CPU seconds or {LARGEST} GB")


if __name__ == "__main__":
    main()
