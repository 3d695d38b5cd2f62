"""Commands in processes of their own that need not import torch again: forks of one process that has.

Run as a program: reads one command per line, as JSON, and says which process it is, and later how it ended.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

IMPORTED = (
    "torch",
    "torch._dynamo",  # every optimizer of torch brings it along
    "torchemo.apps.cli.train",
    "torchemo.apps.cli.evaluate",
    "torchemo.runs.train",
    "torchemo.runs.compare",
    "torchemo.runs.score",
    "torchemo.lab.commands.study",
    "torchemo.lab.study.run",
    "torchemo.learners.gradient.maml",
)
"""What a command imports before it does anything; nothing of it looks for parts of other distributions."""


class Warm:
    """A process whose forks are commands, as if each had been typed."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._said = tempfile.TemporaryDirectory()

    def start(self, *words, cwd=".", env=None):
        """Begin ``torchemo WORDS``, or ``python -c CODE`` for the words ``-c CODE``."""
        out = tempfile.mkdtemp(dir=self._said.name)
        asked = {"words": [str(w) for w in words], "cwd": str(cwd), "env": env or {}, "said": out}
        for name in ("out", "err"):
            (Path(out) / name).touch()
        return Command(self, self._ask(asked), Path(out))

    def run(self, *words, **how):
        """Run a command to its end."""
        return self.start(*words, **how).wait()

    def end(self):
        self._server.stdin.close()
        self._server.wait(60)
        self._server.stdout.close()
        self._said.cleanup()

    def _ask(self, asked):
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())


class Command:
    """A command that was begun; ``pid`` is its process."""

    def __init__(self, warm, pid, said):
        self.pid = pid
        self._warm, self._said, self._ended = warm, said, None

    def poll(self):
        """Return how it ended, like `subprocess.Popen.poll`; None if it has not."""
        return self._status(wait=False)

    def wait(self):
        """Wait for its end; return its code and what it printed."""
        return subprocess.CompletedProcess((), self._status(wait=True), *self.said())

    def said(self):
        """Return what it has printed so far, on either stream."""
        return tuple((self._said / name).read_text() for name in ("out", "err"))

    def _status(self, *, wait):
        if self._ended is None:
            self._ended = self._warm._ask({"pid": self.pid, "wait": wait})
        return self._ended


def serve():
    """Fork for every command, wait for the forks that are asked about, and leave none behind."""
    living = set()
    for line in sys.stdin:
        asked = json.loads(line)
        if "pid" in asked:
            pid, status = os.waitpid(asked["pid"], 0 if asked["wait"] else os.WNOHANG)
            told = os.waitstatus_to_exitcode(status) if pid else None
            living.discard(pid)
        else:
            told = os.fork()
            if not told:
                return asked
            living.add(told)
        print(json.dumps(told), flush=True)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return None


def live(asked):
    """Be the command."""
    os.chdir(asked["cwd"])
    os.environ.update(asked["env"])
    sys.path[:0] = ["", *filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep))]
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [
        os.open(f"{asked['said']}/{n}", os.O_WRONLY | os.O_CREAT, 0o600) for n in ("out", "err")
    ]
    for number, handle in enumerate((nothing, *files)):
        os.dup2(handle, number)
        os.close(handle)
    if asked["words"][0] == "-c":
        sys.argv = ["-c"]
        exec(compile(asked["words"][1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = ["torchemo", *asked["words"]]
        import_module("torchemo.apps.cli").main()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # else every fork would copy what it looks through at its end
    if (given := serve()) is not None:
        live(given)
