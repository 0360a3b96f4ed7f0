"""Compiles the C shim of the sandbox into a shared library beside this file.

    python -m weft.programs.sandbox.build_shim

Owns the compiler's command line. Installing the package calls it too (`setup.py`), so it imports nothing but the
standard library and `weft.native`. Without the library, sandboxed programs run on a thread each.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from weft import native

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "src" / "shim.c"
LIBRARY = HERE / "_weft_shim.so"
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")


def source_hash() -> str:
    """Identifies the source, so that a library that was built from another one is not used."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


def build(target: Path = LIBRARY) -> Path:
    """Compile and link; replaces `target` in one step. Raises `native.BuildError`."""
    compiler = native.find_compiler("C", "CC", ("cc", "gcc", "clang"))
    with native.replacing(target) as made:
        native.run([[*compiler, *_FLAGS, f'-DWEFT_SOURCE_HASH="{source_hash()}"', str(SOURCE), "-o", str(made)]])
    return target


if __name__ == "__main__":
    sys.exit(native.main(build, "The sandbox's shim was not built"))
