"""Files that commands write for their users."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from weft.abi.errors import WeftError


def write_file(file: Path, text: str) -> None:
    """Write a whole file; where that fails, what was there before is still there. Raises `WeftError`."""
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            file.write_text(text, encoding="utf-8")  # a device or a link is written through, not replaced
        else:
            _replace(file, text)
    except OSError as error:
        raise WeftError(f"{file} cannot be written: {error.strerror}") from error


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        if file.exists():
            shutil.copymode(file, partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
