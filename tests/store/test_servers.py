"""The locks of servers that share a folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from weft.store.servers import ServerLock, is_free


def test_a_file_is_removed_only_with_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server has made its file and is about to lock it: after the lock it must see that the file is gone."""
    new, tidying = ServerLock(tmp_path), ServerLock(tmp_path)
    path = tmp_path / f"server-{new.name}.lock"
    number = os.open(path, os.O_CREAT | os.O_RDWR)
    unlink, was_locked = Path.unlink, []

    def removed(self: Path, missing_ok: bool = False) -> None:
        was_locked.append(not is_free(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", removed)
    tidying.tidy()
    assert was_locked == [True]
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(number)
    new.hold()
    tidying.tidy()
    assert path.exists()
    assert tidying.is_gone("other")
    assert not tidying.is_gone(new.name)
    new.release()
