"""Metadata of every benchmark, of `weft bench` and under `bench/`: machine, versions and command, and the result
file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.cli.files import write_file


def surroundings(*, threads: int | None = None, ran: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The `machine` (with the `threads` that were used, if given) and the `versions`, as JSON values.

    `ran` has versions of other engines, by name. Imports torch.
    """
    from weft.cli import probe
    from weft.cli.version import versions

    machine = probe.machine() | ({} if threads is None else {"threads": threads})
    return {"machine": machine, "versions": {**versions(), **(ran or {})}}


def heading(where: Mapping[str, Any]) -> str:
    """The processor and the versions of `surroundings`, in one line."""
    machine, versions = where["machine"], where["versions"]
    return f"{machine['cpu']}, {machine['usable_cores']} cores; weft {versions['weft']}, Python {versions['python']}"


def command_line(module: str | None = None) -> str:
    """The command that this process runs: `python -m MODULE` with its arguments, or the console script. Of absolute
    paths, which say something of this machine alone, the last part."""
    program = [Path(sys.argv[0]).name] if module is None else ["python", "-m", module]
    return shlex.join([*program, *(Path(part).name if Path(part).is_absolute() else part for part in sys.argv[1:])])


def write_record(file: Path, content: Mapping[str, Any]) -> None:
    """Write a result as JSON, atomically. Raises `WeftError`."""
    write_file(file, json.dumps(content, indent=2) + "\n")
