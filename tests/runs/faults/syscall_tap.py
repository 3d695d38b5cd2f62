"""Stands between torchemo and the operating system.

A `Tap` counts the calls that touch files, makes one of them fail, or lets the process "die" at one of them:
from then on nothing reaches the disk any more, clean-up code included. It also remembers what was never
synced, so that `power_cuts` can give every disk that a power failure at this moment may leave behind:
unsynced data may be lost, and each folder may have forgotten the names it was not told to keep.
"""

import contextlib
import itertools
import os
import shutil
from pathlib import Path

READS = ("read", "pread", "close")
CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", *READS)
CALLS += ("truncate", "ftruncate")


class Died(BaseException):
    """The process is no more."""


class Tap:
    """Patch `os` while the block runs.

    Args:
        at: Number of the call, from 1 on, at which to act; 0 never acts.
        problem: Error number to raise at this call, once; None lets the process die there.
        half: When it dies in a write, half of the bytes are written before.
    """

    def __init__(self, at=0, *, problem=None, half=False):
        self.at, self.problem, self.half = at, problem, half
        self.calls = []  # (name of the call, path it is about)
        self.dead = False
        self.unsynced_data = set()  # inodes of files
        # (inode of the folder, kind, old name or None, new name or None, what was replaced or None)
        self.unsynced_names = []
        self._paths = {}  # open handles

    def __enter__(self):
        self._real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            setattr(os, name, self._wrap(name))
        return self

    def __exit__(self, kind, error, trace):
        for name, function in self._real.items():
            setattr(os, name, function)
        return kind is Died

    def _wrap(self, name):
        def call(*args, **kwargs):
            if self.dead:
                if name != "close":
                    raise Died
                with contextlib.suppress(OSError):  # closed by the call that was the last
                    self._real[name](*args)
                return None
            self.calls.append((name, self._path(args[0])))
            if len(self.calls) == self.at:
                self._act(name, args)
            return self._forward(name, args, kwargs)

        return call

    def _path(self, target):
        return self._paths.get(target, "?") if isinstance(target, int) else os.fspath(target)

    def _act(self, name, args):
        if name == "close":
            self._real["close"](*args)
        if self.problem is not None:
            raise OSError(self.problem, os.strerror(self.problem))
        if name == "write" and self.half:
            self._forward("write", (args[0], bytes(args[1])[: len(args[1]) // 2]), {})
        self.dead = True
        raise Died

    def _forward(self, name, args, kwargs):
        if name == "fsync":
            return self._synced(args[0])
        if name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
            self._renamed(name, args, kwargs)
        if name == "open":
            made = args[1] & os.O_CREAT and not os.path.lexists(args[0])
            if made:
                self._renamed("create", args, kwargs)
            handle = self._real["open"](*args, **kwargs)
            self._paths[handle] = self._path(args[0])
            if made:
                self.unsynced_data.add(os.fstat(handle).st_ino)
            return handle
        if name in ("write", "ftruncate"):
            self.unsynced_data.add(os.fstat(args[0]).st_ino)
        return self._real[name](*args, **kwargs)

    def _synced(self, handle):
        # Not forwarded: what is synced is known here, and hundreds of trials stay quick.
        inode = os.fstat(handle).st_ino
        self.unsynced_data.discard(inode)
        self.unsynced_names = [change for change in self.unsynced_names if change[0] != inode]

    def _renamed(self, name, args, kwargs):
        old = None if name in ("create", "mkdir") else os.path.basename(args[0])
        new = {"create": args[0], "mkdir": args[0]}.get(name)
        new = args[1] if name in ("rename", "replace") else new
        folder = kwargs.get("dir_fd")
        inode = (
            os.stat(os.path.dirname(args[0])).st_ino if folder is None else os.fstat(folder).st_ino
        )
        there = name == "replace" and os.path.isfile(new)
        replaced = Path(new).read_bytes() if there else None
        self.unsynced_names.append((inode, name, old, new and os.path.basename(new), replaced))


def power_cuts(run, tap, scratch):
    """Yield copies of ``run`` as every power failure at this moment may leave it."""
    where = {os.stat(path).st_ino: path for path, _, _ in os.walk(run)}
    files = {os.stat(file).st_ino: file for file in Path(run).rglob("*") if file.is_file()}
    lost = [files[inode].relative_to(run) for inode in tap.unsynced_data if inode in files]
    forgetful = sorted({change[0] for change in tap.unsynced_names if change[0] in where})
    subsets = [s for n in range(len(forgetful) + 1) for s in itertools.combinations(forgetful, n)]
    fates = (False, True) if lost else (False,)
    for number, (subset, data_lost) in enumerate(itertools.product(subsets, fates)):
        copy = Path(scratch) / f"cut-{number}"
        shutil.copytree(run, copy)
        for file in lost if data_lost else ():
            os.truncate(copy / file, 0)
        for inode, kind, old, new, replaced in reversed(tap.unsynced_names):
            if inode in subset:
                _undo(copy / Path(where[inode]).relative_to(run), kind, old, new)
                if replaced is not None:
                    (copy / Path(where[inode]).relative_to(run) / new).write_bytes(replaced)
        yield copy
        shutil.rmtree(copy)


def _undo(folder, kind, old, new):
    """Take one change of a folder's names back. What was deleted stays so: that is the harder case."""
    if not folder.is_dir():
        return
    if kind in ("rename", "replace") and (folder / new).exists():
        os.rename(folder / new, folder / old)
    elif kind in ("create", "mkdir") and (folder / new).exists():
        shutil.rmtree(folder / new) if (folder / new).is_dir() else os.unlink(folder / new)
