"""The frozen cases: test cases for the card, validation cases for choices made while training.

They were written once and do not change with the generator: `append` adds
cases of a new kind and changes no others. Validation cases are not in the test set, and neither has an open value
or a held-out phrasing that training uses.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from training.weft_tiny.examples import Check, Example

COLUMNS = ("values", "templates")
TEST, VALIDATION = (Path(__file__).parent / name for name in ("test_cases.jsonl.xz", "validation_cases.jsonl.xz"))

Cases = dict[tuple[str, str], list[Example]]
"""Cases by column and kind."""


def _row(column: str, example: Example) -> dict[str, Any]:
    plain = asdict(Check())
    checks = [{name: value for name, value in asdict(check).items() if value != plain[name]}
              for check in example.checks]  # fmt: skip
    row = {"column": column, "kind": example.kind, "messages": example.messages, "checks": checks}
    return row | ({"tools": example.tools} if example.tools else {})


def _check(values: dict[str, Any]) -> Check:
    tuples = {entry.name for entry in fields(Check) if isinstance(entry.default, tuple)} | {"call"}
    return Check(**{name: tuple(value) if name in tuples else value for name, value in values.items()})


def append(path: Path, cases: Iterable[tuple[str, Sequence[Example]]]) -> None:
    """Append cases of new kinds, given by column, to a file of compressed JSON lines.

    Raises:
        ValueError: the file has cases of such a kind and column already.
    """
    kept = lzma.decompress(path.read_bytes()).decode() if path.exists() else ""
    frozen = read(path) if kept else {}
    rows = [(column, case) for column, group in cases for case in group]
    if taken := {(column, case.kind) for column, case in rows} & set(frozen):
        raise ValueError(f"cases are frozen and cannot be added to: {sorted(taken)}")
    lines = [json.dumps(_row(column, case), ensure_ascii=False) + "\n" for column, case in rows]
    path.write_bytes(lzma.compress((kept + "".join(lines)).encode(), preset=9 | lzma.PRESET_EXTREME))
    read.cache_clear()


@cache
def read(path: Path) -> Cases:
    """The cases of a file."""
    found: Cases = {}
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        row = json.loads(line)
        case = Example(row["kind"], row["messages"], list(map(_check, row["checks"])), row.get("tools", []))
        found.setdefault((row["column"], row["kind"]), []).append(case)
    return found


def validation() -> Cases:
    """The cases of the validation set."""
    return read(VALIDATION)
