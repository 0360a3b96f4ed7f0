"""Failures of the disk under what programs keep: told to clients without paths, logged with them."""

from __future__ import annotations

import logging
from pathlib import Path

from weft.abi.errors import StorageFailed

logger = logging.getLogger("weft.programs")


def storage_failed(message: str, path: Path) -> StorageFailed:
    """The error to raise. Its message reaches clients; only the log says which path of the server failed."""
    logger.error("storage failed at %s: %s", path, message)
    return StorageFailed(message)
