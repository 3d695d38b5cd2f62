"""Images are decoded in a process of their own, with a limit on its memory and time."""

import io
import json
import multiprocessing
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple, final

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from torchemo.core.errors import DataError, ResourceError
from torchemo.data.formats.images import PictureForm, decode

SECONDS = 30.0
"""An image that takes longer to decode is refused."""
START = 300.0
"""Time for the process to start, which on a busy machine takes longer than any image."""
MEMORY = 4 << 30
"""Bytes of address space of the process."""
READY = b"ready"
SIDE = 160
"""Side of a thumbnail, in pixels."""


class Decoded(NamedTuple):
    """An image in the form the network takes, and a thumbnail of it as JPEG."""

    pixels: UInt8[np.ndarray, "c h w"]
    thumbnail: bytes


@final
class Decoder:
    """Decodes one image at a time; a process that hangs or dies is replaced.

    Args:
        form: What comes out.
        seconds: Time for one image.
    """

    def __init__(self, form: PictureForm, *, seconds: float = SECONDS) -> None:
        self._form, self._seconds = form, seconds
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._line: Connection | None = None

    def decode(self, source: bytes, *, name: str) -> Decoded:
        """Decode an image.

        Raises:
            DataError: It cannot be decoded, or not within the limits.
        """
        with self._lock:
            line = self._open()
            try:
                line.send_bytes(name.encode())
                line.send_bytes(source)
                if not line.poll(self._seconds):
                    raise TimeoutError
                found = json.loads(line.recv_bytes())
                if "error" in found:
                    raise DataError(found["error"], hint=found["hint"])
                pixels = np.frombuffer(line.recv_bytes(), np.uint8).reshape(self._shape)
                return Decoded(pixels, line.recv_bytes())
            except (TimeoutError, EOFError, OSError) as error:
                self._end()
                raise DataError(
                    f"{name}: cannot be decoded within {self._seconds:g} seconds and"
                    f" {MEMORY >> 30} GB of memory.",
                    hint="Scale the image down before using it.",
                ) from error

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self._form.channels, self._form.height, self._form.width

    def _open(self) -> Connection:
        if self._line is None:
            # Not forked: a copy of a process with threads may hang.
            context = multiprocessing.get_context("spawn")
            self._line, there = context.Pipe()
            self._process = context.Process(target=work, args=(there, self._form), daemon=True)
            self._process.start()
            there.close()
            self._await_start(self._line)
        return self._line

    def _await_start(self, line: Connection) -> None:
        with suppress(EOFError, OSError):
            if line.poll(START) and line.recv_bytes() == READY:
                return
        self._end()
        raise ResourceError(
            f"the process that decodes images did not start within {START:g} seconds.",
            hint="Free memory and processors of this machine, then try again.",
        )

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._line = self._process = None


def work(line: Connection, form: PictureForm) -> None:
    """Decode what comes, until nobody asks any more."""
    _limit_memory()
    with suppress(EOFError, KeyboardInterrupt):
        line.send_bytes(READY)
        while True:
            name, source = line.recv_bytes().decode(), line.recv_bytes()
            try:
                parts = [decode(source, form, name=name).tobytes(), _thumbnail(source, name)]
                head = {}
            except DataError as error:
                parts, head = [], {"error": error.message, "hint": error.hint}
            for part in (json.dumps(head).encode(), *parts):
                line.send_bytes(part)


def jpeg(pixels: UInt8[np.ndarray, "c h w"]) -> bytes:
    """Encode pixels as JPEG."""
    stream = io.BytesIO()
    plane = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    Image.fromarray(np.ascontiguousarray(plane)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def _thumbnail(source: bytes, name: str) -> bytes:
    return jpeg(decode(source, PictureForm(SIDE, SIDE), name=name))


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
