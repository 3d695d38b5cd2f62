"""A corpus of files that nobody wrote by accident, each in a checkpoint whose manifest vouches for it.

Run as a program: ``hostile.py FOLDER``; loads them all and prints how each was refused, how long it took
and how much memory it cost, as JSON.
"""

import hashlib
import json
import os
import pickle
import resource
import struct
import sys
import time
import zipfile
from pathlib import Path

from torchemo.runs.storage.checkpoint import load, verify
from torchemo.runs.storage.manifest import MAX_MANIFEST
from torchemo.runs.storage.tensorfile import MAX_HEADER


def file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def pickles(canary):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        yield f"pickle {protocol}", pickle.dumps(Canary(canary), protocol=protocol)


def zipped(canary, scratch):
    with zipfile.ZipFile(scratch, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Canary(canary)))
    return Path(scratch).read_bytes()


def corpus(canary, scratch):
    """Yield names and contents; what the tensors should be is always ``w: float32[2]``."""
    one = entry([2], 0, 8)
    twice = b'{"w":%s,"w":%s}' % ((json.dumps(one).encode(),) * 2)
    yield "empty", b""
    yield "header of 2^63 bytes", struct.pack("<Q", 2**63) + b"{}"
    yield "header of 2^64-1 bytes", struct.pack("<Q", 2**64 - 1) + b"{}"
    yield "header past the end", struct.pack("<Q", 3) + b"{}"
    yield "header too large", file(b" " * (MAX_HEADER + 1))
    million = (b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(10**6))
    yield "a million tensors", file(b"{" + b",".join(million) + b"}")
    yield "nested", file(b"[" * 100_000)
    yield "many lists", file(b"[" + b"[]," * (MAX_HEADER // 3 - 2) + b"[]]")
    yield "a number of many digits", file(b'{"w":' + b"9" * 10**5 + b"}")
    yield "not JSON", file(b"{]")
    yield "not text", file(b"\xff\xfe\xfd")
    yield "a list", file([one])
    yield "same name twice", file(twice, b"\0" * 8)
    yield "no name", file({"": one}, b"\0" * 8)
    yield "overlap", file({"w": one, "v": entry([2], 4, 12)}, b"\0" * 12)
    yield "same bytes twice", file({"w": one, "v": one}, b"\0" * 8)
    yield "hole", file({"w": entry([2], 4, 12)}, b"\0" * 12)
    yield "bytes left", file({"w": one}, b"\0" * 9)
    yield "bytes missing", file({"w": one}, b"\0" * 7)
    yield "backwards", file({"w": entry([2], 8, 0)}, b"\0" * 8)
    yield "negative offset", file({"w": entry([2], -8, 0)}, b"")
    yield "negative size", file({"w": entry([-2], 0, 8)}, b"\0" * 8)
    yield "two negative sizes", file({"w": entry([-2, -1], 0, 8)}, b"\0" * 8)
    yield "product overflow", file({"w": entry([2**62, 4], 0, 8)}, b"\0" * 8)
    yield "many axes", file({"w": entry([1] * 10**5, 0, 4)}, b"\0" * 4)
    yield "sizes that are true", file({"w": entry([True, 2], 0, 8)}, b"\0" * 8)
    yield "sizes with a fraction", file({"w": entry([2.0], 0, 8)}, b"\0" * 8)
    yield "unknown dtype", file({"w": entry([2], 0, 8, "F33")}, b"\0" * 8)
    yield "dtype of the wrong type", file({"w": entry([2], 0, 8, ["F32"])}, b"\0" * 8)
    yield "no shape", file({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, b"\0" * 8)
    yield "a long name", file({"x" * 10**5: one}, b"\0" * 8)
    yield "a name with an escape", file({"\x1b[2J": one}, b"\0" * 8)
    yield "another shape", file({"w": entry([1, 2], 0, 8)}, b"\0" * 8)
    yield "another name", file({"x": one}, b"\0" * 8)
    yield "one more", file({"w": one, "x": entry([0], 8, 8)}, b"\0" * 8)
    yield "NaN", file({"w": one}, struct.pack("<2f", 1.0, float("nan")))
    yield "infinity", file({"w": one}, struct.pack("<2f", float("-inf"), 1.0))
    yield from pickles(canary)
    yield "zipped pickle", zipped(canary, scratch)
    yield "array of objects", b"\x93NUMPY\x01\x00" + pickle.dumps(Canary(canary))


def vouch(folder, content):
    """Write a checkpoint whose manifest has the right size, hash and seal for ``content``."""
    folder.mkdir()
    (folder / "state.safetensors").write_bytes(content)
    described = {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "tensors": {"w": "float32[2]"},
    }
    seal(folder, {"state.safetensors": described})


def seal(folder, files, **changes):
    body = {
        "format": "torchemo checkpoint",
        "format_version": 1,
        "step": 1,
        "config_hash": "",
        "versions": {},
        "info": {},
        "files": files,
    } | changes
    text = json.dumps(body, indent=1) + "\n"
    body["seal"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body, indent=1) + "\n")


def sealed(text):
    """Put the right seal on any text."""
    digest = hashlib.sha256(text + b"\n}\n").hexdigest().encode()
    return text + b',\n "seal": "' + digest + b'"\n}\n'


def manifests():
    """Yield manifests that nobody wrote by accident either, most of them with the right seal."""
    yield "manifest too large", sealed(b'{"a": "' + b"x" * MAX_MANIFEST + b'"')
    yield "manifest of lists", sealed(b'{"a":[' + b"[]," * (MAX_MANIFEST // 3 - 50) + b"[]]")
    yield "nested manifest", sealed(b'{"a":' * 100_000)
    yield "nested and closed manifest", sealed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000)
    yield "manifest of a long number", sealed(b'{"step": ' + b"9" * 10**5)
    huge = b'{"format_version": 1, "versions": {"torchemo": [' + b"1," * 400_000 + b"1]}"
    yield "manifest of a long version", sealed(huge)
    yield "manifest with infinity", sealed(b'{"format_version": 1e999')
    yield "manifest that is a list", b"[]\n"
    yield "manifest that is a pickle", pickle.dumps({"step": 1})
    yield "manifest in utf-16", '{"step": 1}'.encode("utf-16")
    yield "manifest without a seal", b'{\n "step": 1\n}\n'


def judge(folder, checks):
    """Load one checkpoint, after everything it needs is imported and warm."""
    said = []
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for check in checks:
        try:
            check(folder)
            said.append(None)
        except Exception as error:
            said.append([type(error).__name__, str(error)])
    seconds = (time.process_time() - began) / len(checks)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"said": said, "seconds": seconds, "megabytes": grown / 1024}


def main(place):
    folders = sorted(path for path in place.iterdir() if path.name.startswith("case "))
    vouch(place / "warm", file({"w": entry([2], 0, 8)}, b"\0" * 8))
    results = {"warm": judge(place / "warm", [load, verify])}
    return results | {path.name[5:]: judge(path, [load, verify]) for path in folders}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
