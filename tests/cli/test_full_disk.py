"""A disk that is full: one line that says so, and what was there before is still there."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from tests.cli.test_chat import Script, play
from tests.server.conftest import running
from weft.abi.errors import ConfigError, WeftError
from weft.cli.files import write_file
from weft.cli.loading import QUIET_BYTES, loading_progress
from weft.cli.random_weights import random_weights
from weft.config import ServerConfig
from weft.models import random_checkpoints
from weft.server.logs import configure_logging

FULL = Path("/dev/full")
NO_SPACE = os.strerror(errno.ENOSPC)
SMALL = ("--max-tokens", "3", "--num-pages", "256")

needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@needs_full
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("version",),
        ("models", "--json"),
        ("serve", "--print-config"),
        ("generate", "Once upon a time", *SMALL),
        ("generate", "Once upon a time", "--stream", *SMALL),
        ("generate", "--jsonl", *SMALL),
        ("chat", *SMALL),
    ],
    ids=" ".join,
)
def test_output_that_does_not_fit(arguments: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "weft.cli.main", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, input="Hello\n")
    assert ended.stderr == f"weft: the output cannot be written: {NO_SPACE}\n"
    assert ended.returncode == 1


@pytest.fixture
def disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each file, the first half fits."""
    write = Path.write_text

    def write_half(file: Path, text: str, **options: str) -> int:
        write(file, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, NO_SPACE, str(file))

    monkeypatch.setattr(Path, "write_text", write_half)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    write_file(file, "old")
    file.chmod(0o600)
    write_file(file, "older")
    assert file.read_text() == "older"
    assert file.stat().st_mode & 0o777 == 0o600
    link.symlink_to(file)
    write_file(link, "through the link")
    assert link.is_symlink()
    assert file.read_text() == "through the link"
    link.unlink()
    request.getfixturevalue("disk_is_full")
    for target in (file, tmp_path / "new"):
        with pytest.raises(WeftError, match=f"{target} cannot be written: {NO_SPACE}"):
            write_file(target, "much newer than all that")
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text() == "through the link"


@pytest.mark.usefixtures("disk_is_full")
def test_a_chat_that_cannot_be_saved_goes_on_for_people_and_ends_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("a", f"/save {tmp_path / 'chat.json'}", "b")
    assert len(play(Script(["1"], ["2"]), *lines).messages) == 4
    assert f"weft: {tmp_path / 'chat.json'} cannot be written: {NO_SPACE}\n" in capsys.readouterr().err
    with pytest.raises(WeftError, match=NO_SPACE):
        play(Script(["1"]), *lines, interactive=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, NO_SPACE), SafetensorError(f"I/O error: {NO_SPACE}")])
def test_random_weights_that_do_not_fit(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.setattr(random_checkpoints, "save_file", fail)
    with pytest.raises(ConfigError, match=NO_SPACE):
        random_weights("tiny", lambda line: None)
    assert not list((tmp_path / "random-weights").iterdir())


@needs_full
def test_a_server_whose_log_is_full_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("weft", "uvicorn"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", False)
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        configure_logging(ServerConfig())
        loading_progress("a large model")(QUIET_BYTES, 2 * QUIET_BYTES)
        with running() as server:
            answer = server.chat()
            assert answer.status_code == 200
            assert json.loads(answer.text)["choices"]
        monkeypatch.undo()
        with pytest.raises(OSError, match=NO_SPACE):
            full.close()
