"""The server that a benchmark starts keeps its data apart from the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from weft.cli.bench import server
from weft.cli.settings import load
from weft.server.programs import data_folder


@pytest.mark.parametrize("where", ["WEFT_DATA", "WEFT_PROGRAMS_DATA_DIR", "the settings"])
def test_its_data_is_in_a_folder_of_its_own(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = tmp_path / "user"
    used: list[Path] = []

    @contextlib.contextmanager
    def instead(command: list[str], environment: Mapping[str, str], port: int) -> Iterator[server.ServerProcess]:
        with monkeypatch.context() as there:
            for name in ("WEFT_DATA", "WEFT_PROGRAMS_DATA_DIR"):
                there.delenv(name, raising=False)
            for name, value in environment.items():
                there.setenv(name, value)
            config = load(file=Path(command[command.index("--config") + 1]), environment=environment).config
            used.append(data_folder(config.programs))
        used[-1].mkdir(exist_ok=True)
        yield server.ServerProcess("http://127.0.0.1:1", cast(Any, None))

    monkeypatch.setattr(server, "server_process", instead)
    settings = load()
    if where == "the settings":
        settings = load(flags={"programs.data_dir": ("a flag", str(users))})
    else:
        monkeypatch.setenv(where, str(users))
        settings = load(environment={where: str(users)})
    for _ in range(2):
        with server.own_server(settings):
            assert not used[-1].is_relative_to(users)
            assert used[-1].parent.is_dir()
        assert not used[-1].exists(), "it goes with the server"
    assert used[0] != used[1]
