"""Files of results that a later run continues."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def continued(file: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record in `file`, to be continued by a run that would begin with `record`; that one where there is no file.

    Ends the process if the file is of another processor, other versions or other settings (`asked`).
    """
    if not file.exists():
        return dict(record)
    before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    same = before.get("asked") == record["asked"] and before["machine"]["cpu"] == record["machine"]["cpu"]
    if not same or before["versions"] != record["versions"]:
        sys.exit(f"{file} is of another machine, other versions or other settings: {before.get('asked')}")
    return before
