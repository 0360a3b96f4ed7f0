"""What a program finds where the system was: clocks, random numbers, print, and the refusal of everything else by name.

There is no WASI below: a system call that is not replaced here ends the instance with a trap, and nothing else.
"""

import builtins
import hashlib
import importlib.abc
import importlib.machinery
import io
import linecache
import os
import random
import socket
import sys
import time
import types

from weft.programs.sandbox.runner.link import LINK
from weft.programs.sandbox.runner.source import compile_without_files, eval_without_files, exec_without_files


def denied(name):
    def refuse(*args, **kwargs):
        raise PermissionError(f"{name} is not available to a sandboxed program")

    refuse.__name__ = name.rpartition(".")[2]
    return refuse


# ---- clocks


def _sleep(seconds):
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    end = LINK.now() + seconds
    while (left := end - LINK.now()) > 0:
        LINK.push(left)


def _nanoseconds():
    return int(LINK.now() * 1e9)


def _with_now(function):
    def timed(seconds=None):
        return function(LINK.now() if seconds is None else seconds)

    return timed


def install_clocks():
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        setattr(time, name, LINK.now)
        setattr(time, f"{name}_ns", _nanoseconds)
    time.sleep = _sleep
    time.clock_gettime = lambda clock: LINK.now()
    time.get_clock_info = lambda name: types.SimpleNamespace(
        resolution=1e-6, monotonic=True, adjustable=False, implementation="host"
    )
    # Without a time zone: local time is UTC.
    time.gmtime = time.localtime = _with_now(time.gmtime)
    strftime, asctime = time.strftime, time.asctime
    time.strftime = lambda form, at=None: strftime(form, time.gmtime() if at is None else at)
    time.asctime = lambda at=None: asctime(time.gmtime() if at is None else at)
    time.ctime = lambda seconds=None: asctime(time.gmtime(seconds))
    time.tzname, time.timezone, time.altzone, time.daylight = ("UTC", "UTC"), 0, 0, 0


# ---- random numbers


class Entropy:
    """A stream of bytes from the run's seed: SHA-256 of a counter."""

    def __init__(self):
        self._key = b""
        self._counter = 0

    def seed(self, key):
        self._key, self._counter = key, 0

    def __call__(self, size):
        blocks = []
        for _ in range(-(-size // 32)):
            self._counter += 1
            blocks.append(hashlib.sha256(self._key + self._counter.to_bytes(8, "little")).digest())
        return b"".join(blocks)[:size]


ENTROPY = Entropy()


# ---- output, files, imports


LOG = 1
"""`weft.abi.operations.Op.LOG`; the library is loaded when the clocks are in place."""


class LogOutput(io.TextIOBase):
    """print: each line becomes a LOG command."""

    def __init__(self, level):
        self._level = level
        self._pieces = []

    encoding = "utf-8"

    def writable(self):
        return True

    def isatty(self):
        return False

    def fileno(self):
        raise OSError("the output of a sandboxed program has no file descriptor")

    def write(self, text):
        self._pieces.append(text)
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self):
        text = "".join(self._pieces)
        self._pieces.clear()
        if text:
            LINK.channel.post(LOG, self._level, text.removesuffix("\n").encode("utf-8", "replace"))
            LINK.push_sometimes()


class _Missing(importlib.abc.MetaPathFinder):
    """The last finder: says what there is instead."""

    def find_spec(self, name, path=None, target=None):
        """Find nothing."""
        raise ModuleNotFoundError(
            f"No module named {name!r}: a sandboxed program has weft.sdk and the modules of the standard library that "
            "need no system",
            name=name,
        )


def install_stubs():
    builtins.compile, builtins.exec, builtins.eval = compile_without_files, exec_without_files, eval_without_files
    builtins.open = io.open = io.open_code = io.FileIO = denied("open")
    builtins.input = denied("input")
    for name in (
        *("open", "fdopen", "popen", "system", "fork", "execv", "execve", "kill", "listdir", "scandir", "walk", "stat"),
        *("lstat", "access", "remove", "unlink", "rename", "replace", "mkdir", "makedirs", "rmdir", "link", "symlink"),
        *("readlink", "chdir", "utime", "truncate", "read", "write", "close", "pipe", "dup", "fstat", "_exit", "abort"),
        *("isatty", "get_terminal_size", "times", "fsync", "chmod", "urandom", "getrandom", "cpu_count"),
    ):
        if hasattr(os, name):
            setattr(os, name, denied(f"os.{name}"))
    os.getcwd = lambda: "/"
    os.urandom = random._urandom = ENTROPY
    for name in ("socket", "create_connection", "create_server", "getaddrinfo", "gethostbyname", "socketpair"):
        setattr(socket, name, denied(f"socket.{name}"))
    # Lines of the program itself are put there when it runs; no others can be read.
    linecache.updatecache = lambda *args, **kwargs: []
    linecache.checkcache = lambda *args, **kwargs: None
    sys.path[:] = []
    sys.path_hooks[:] = []
    sys.meta_path[:] = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, _Missing()]
