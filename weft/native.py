"""Compiles native libraries: finds a compiler, runs it, and puts what it made in its place in one step.

Owns nothing of what is compiled: the builders (`weft.kernels.cpu.build`, `weft.programs.sandbox.build_shim`) know
sources and flags. Installing the package runs them before anything is installed (`setup.py`), so this module imports
nothing but the standard library, and neither do they, nor the packages on the way to them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which and how."""


def find_compiler(language: str, variable: str, names: Sequence[str]) -> list[str]:
    """The start of a compiler's command line: what the environment's `variable` says, or the first of `names` that is
    installed. Raises `BuildError`."""
    named = os.environ.get(variable)
    if named:
        return shlex.split(named)
    for name in names:
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError(f"no {language} compiler: looked for ${variable}, {', '.join(names[:-1])} and {names[-1]}")


def run(commands: Sequence[list[str]]) -> None:
    """Run commands at the same time. Raises `BuildError` with what the first that failed had to say."""
    running = [_start(command) for command in commands]
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            raise BuildError(f"{shlex.join(command)} failed:\n{output.strip()}")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path to make a library at, in a folder of its own. It takes the place of `target` when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, target.name)
        yield made
        # Another process may have the old file mapped: it keeps that one, and new processes find the new one whole.
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as beside:
            beside.write(made.read_bytes())
        os.chmod(beside.name, 0o755)  # noqa: S103
        os.replace(beside.name, target)


def main(build: Callable[[], Path], failure: str) -> int:
    """Build, and say where; `failure` and its reason when there is one. The exit status of the builder."""
    try:
        print(f"built {build()}")
    except BuildError as error:
        print(f"{failure}: {error}", file=sys.stderr)
        return 1
    return 0


def _start(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(  # noqa: S603
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
