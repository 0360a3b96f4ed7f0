"""Reading of programs, and writing of result files that keeps the old content if it fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from weft.abi.errors import WeftError


def read_file(file: Path) -> bytes:
    """Return the content of a file. Raises `WeftError`."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise WeftError(f"{file} cannot be read: {error.strerror}") from error


def write_file(file: Path, text: str) -> None:
    """Write a file as a whole; if that fails, the old content stays. Raises `WeftError`."""
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            file.write_text(text, encoding="utf-8")  # write through a device or a link; do not replace it
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
