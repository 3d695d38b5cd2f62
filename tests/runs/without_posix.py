"""``pytest -p tests.runs.without_posix tests/runs``: the same tests without what only POSIX has.

Calls that Windows or macOS lack are taken away before anything is imported, and locks are files that are
there or not.
"""

import os

import filelock

CALLS = ("pread", "pwrite", "posix_fadvise", "sysconf", "sched_getaffinity", "memfd_create", "link")
FLAGS = ("O_NOFOLLOW", "O_NONBLOCK")


def take_away() -> None:
    """Remove them from this process."""
    for name in (*CALLS, *FLAGS):
        if hasattr(os, name):
            delattr(os, name)
    filelock.FileLock = filelock.SoftFileLock


take_away()
