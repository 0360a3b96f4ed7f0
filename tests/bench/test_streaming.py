"""The server that the benchmark of streaming starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench import streaming
from weft.cli.settings import load
from weft.server.programs import data_folder


class Started(Exception):
    """In place of a process."""


@pytest.mark.parametrize("where", ["WEFT_DATA", "WEFT_PROGRAMS_DATA_DIR"])
def test_its_data_is_apart_from_the_users(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []

    async def instead(*command: str, env: dict[str, str], **_: object) -> None:
        environments.append(env)
        raise Started

    async def start() -> None:
        with pytest.raises(Started):
            async with streaming.server("weft-tiny", [], tmp_path):
                pass

    monkeypatch.setattr(asyncio, "create_subprocess_exec", instead)
    monkeypatch.setenv(where, str(tmp_path / "user"))
    asyncio.run(start())
    assert data_folder(load(environment=environments[0]).config.programs) == tmp_path / "data"
