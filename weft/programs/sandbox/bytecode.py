"""What sources compile to, kept: a guest's CPython takes milliseconds to compile a program, and no time to load it.

Owns the store of code, bounded, and the order of a program's calls of its component. The host does not look into code:
guests make it, guests load it. Nor may a guest plant code for others:

- An instance is asked to compile before it is asked to run anything, and its answer is taken once, from that call.
  Nothing of a program has run in the instance by then; and once something has, no answer of it gets here.
- Code is found by the source, byte for byte, and its name. Should a source make the compiler itself go wrong, then what
  comes of it reaches nobody but those who asked for that very source to be run.

One store belongs to one component, so code is never given to another version of Python. What others may learn is that
a source which they have too was launched before, from the time that a launch takes.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Generator
from typing import NamedTuple

MAX_CODES = 1024
MAX_BYTES = 64 << 20
"""Of all code; what was not used for longest goes first."""
MAX_CODE_BYTES = 4 << 20
"""Of one program's; longer code is made anew each time."""


class CallInstruction(NamedTuple):
    """Of a component's function: bytes in, bytes out."""

    export: str
    args: tuple[bytes, ...]


Calls = Generator[CallInstruction, bytes, bytes]
"""The calls that a program consists of, one after the other. It is sent what each returned, and returns the result."""


class Bytecode:
    """The store. Used from any thread."""

    def __init__(self) -> None:
        self._codes: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def calls(self, source: bytes, name: bytes, args: bytes, seed: bytes) -> Calls:
        """Those that run a program: compiling comes first where the source is not known when its instance is there."""
        key = hashlib.sha256(b"%d %s" % (len(name), name) + source).digest()
        code = self._find(key)
        if code is None:
            code = yield CallInstruction("compile", (source, name))
            self._keep(key, code)
        return (yield CallInstruction("run", (source, name, code, args, seed)))

    def _find(self, key: bytes) -> bytes | None:
        with self._lock:
            code = self._codes.get(key)
            if code is not None:
                self._codes.move_to_end(key)
            return code

    def _keep(self, key: bytes, code: bytes) -> None:
        """No code: there is something wrong with the source, which its run says."""
        if not 0 < len(code) <= MAX_CODE_BYTES:
            return
        with self._lock:
            self._num_bytes += len(code) - len(self._codes.pop(key, b""))
            self._codes[key] = code
            while self._num_bytes > MAX_BYTES or len(self._codes) > MAX_CODES:
                self._num_bytes -= len(self._codes.popitem(last=False)[1])
