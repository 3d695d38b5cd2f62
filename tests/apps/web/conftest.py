"""A small run behind the page: Proto-MAML on 16-pixel images, which takes any number of classes."""

import asyncio
import io
import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from torchemo.apps.web.answering import Answering
from torchemo.apps.web.app import build_app
from torchemo.apps.web.session import Limits
from torchemo.apps.web.visits import Visits
from torchemo.runs.run import train

TOKEN = "a-token"
COLOURS = {
    "red": (220, 30, 30), "blue": (30, 40, 220), "green": (30, 200, 40), "black": (20, 20, 20),
    "white": (235, 235, 235), "yellow": (220, 210, 30),
}  # fmt: skip


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    options = {"model.filters": 4, "train.validation_tasks": 2, "train.tasks": 1}
    return train(
        "proto-maml", data="procedural", out=tmp_path_factory.mktemp("web") / "colours",
        size=16, steps=1, options=options,
    )  # fmt: skip


@pytest.fixture(scope="session")
def memory_run(tmp_path_factory):
    options = {
        "model.filters": 4, "memory.capacity": 5, "memory.k": 3, "train.validation_tasks": 2,
        "train.tasks": 5,
    }  # fmt: skip
    return train(
        "anil-emo", data="procedural", out=tmp_path_factory.mktemp("web") / "remembers",
        size=16, steps=2, options=options,
    )  # fmt: skip


def averages():
    """Stand in for a pretrained network: the mean colour of each quarter."""
    return torch.nn.Sequential(torch.nn.AvgPool2d(8), torch.nn.Flatten())


@pytest.fixture(scope="session")
def pretrained_run(tmp_path_factory):
    options = {
        "model.name": "tests.apps.web.conftest:averages", "model.size": 16,
        "train.validation_tasks": 2, "train.tasks": 1,
    }  # fmt: skip
    return train(
        "proto-maml", data="procedural", out=tmp_path_factory.mktemp("web") / "pretrained",
        size=16, steps=1, options=options,
    )  # fmt: skip


def image(colour, seed=0, *, size=(20, 24), kind="PNG"):
    """An encoded image of one colour with some grain."""
    grain = np.random.default_rng(seed).integers(-25, 26, (*size, 3))
    pixels = (np.array(COLOURS[colour]) + grain).clip(0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


class Reply(NamedTuple):
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Client:
    """Calls an application without a socket; it lives in one event loop."""

    def __init__(self, app, token=TOKEN):
        self.app, self.token, self.loop = app, token, asyncio.new_event_loop()

    def __call__(self, verb, path, body=b"", *, host=b"127.0.0.1", prefix=None, query=b""):
        whole = (f"/{self.token}" if prefix is None else prefix) + path
        path, _, text = whole.partition("?")
        scope = {
            "type": "http", "method": verb, "path": path, "raw_path": path.encode("utf-8", "replace"),
            "query_string": text.encode() or query, "headers": [(b"host", host)], "http_version": "1.1",
            "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        sent, parts = [], [body]

        async def receive():
            if not parts:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": parts.pop(), "more_body": False}

        async def send(message):
            sent.append(message)

        self.loop.run_until_complete(self.app(scope, receive, send))
        headers = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return Reply(sent[0]["status"], headers, b"".join(m.get("body", b"") for m in sent[1:]))


class Tab:
    """A session, spoken to as the page does."""

    def __init__(self, client):
        self.client = client
        self.key = client("POST", "/api/sessions").json["session"]

    def __call__(self, verb, path="", body=b""):
        return self.client(verb, f"/api/sessions/{self.key}{path}", body)

    def act(self, action, **more):
        return self("POST", "/do", json.dumps({"action": action, **more}).encode())

    @property
    def state(self):
        return self("GET").json

    def teach(self, *names, shots=2):
        for name in names:
            key = self.act("add_class", name=name).json["boxes"][-1]["key"]
            for i in range(shots):
                assert self("POST", f"/images?box={key}&name={i}.png", image(name, i)).status == 200

    def ask(self, *names):
        for i, name in enumerate(names):
            body = image(name, 50 + i)
            assert self("POST", f"/images?name={name}-{i}.png", body).status == 200

    def answer(self):
        assert self.act("answer").status == 200
        while (state := self.state)["job"]["running"]:
            self.client.loop.run_until_complete(asyncio.sleep(0.01))
        return state


@pytest.fixture
def serve():
    """Build clients; their decoders are ended afterwards."""
    made = []

    def build(run, remember=None, **limits):
        store = None if remember is None else Visits(run.trained, remember, run=run.root)
        app = build_app(Answering(run, visits=store), token=TOKEN, limits=Limits(**limits))
        made.append(Client(app))
        return made[-1]

    yield build
    for client in made:
        client.app.state.decoder.close()
        client.loop.close()


@pytest.fixture
def tab(serve, run):
    return Tab(serve(run))
