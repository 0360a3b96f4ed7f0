"""Compiles the C shim of the sandbox into a shared library beside this file.

    python -m weft.programs.sandbox.build_shim

Owns the compiler's command line. Installing the package calls it too (`setup.py`), so it imports nothing but the
standard library. Without the library, sandboxed programs run on a thread each.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "src" / "shim.c"
LIBRARY = HERE / "_weft_shim.so"
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which and how."""


def source_hash() -> str:
    """Identifies the source, so that a library that was built from another one is not used."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


def build(target: Path = LIBRARY) -> Path:
    """Compile and link; replaces `target` in one step. Raises `BuildError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, target.name)
        command = [*_compiler(), *_FLAGS, f'-DWEFT_SOURCE_HASH="{source_hash()}"', str(SOURCE), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        except OSError as error:
            raise BuildError(f"cannot run {command[0]}: {error}") from error
        if done.returncode != 0:
            raise BuildError(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr).strip()}")
        # Another process may have the old file mapped: it keeps that one, and new processes find the new one whole.
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as beside:
            beside.write(made.read_bytes())
        os.chmod(beside.name, 0o755)  # noqa: S103
        os.replace(beside.name, target)
    return target


def _compiler() -> list[str]:
    named = os.environ.get("CC")
    if named:
        return shlex.split(named)
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError("no C compiler: looked for $CC, cc, gcc and clang")


def main() -> int:
    """Build, and say where; 1 and the reason when that fails."""
    try:
        print(f"built {build()}")
    except BuildError as error:
        print(f"The sandbox's shim was not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
