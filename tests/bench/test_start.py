"""The benchmark of the start of a process: its parts, its turns, and one on a small file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import start
from weft.models.random_checkpoints import FAMILIES


def measured(monkeypatch: pytest.MonkeyPatch, file: Path, *arguments: str) -> dict[str, Any]:
    small = {**FAMILIES["qwen3"], "vocab_size": 1200, "tie_word_embeddings": True}
    monkeypatch.setitem(start.SHAPES, "qwen3-0.6b", small)
    monkeypatch.setattr(sys, "argv", ["start", "--vocabulary", "1200", "--json", str(file), *arguments])
    start.main()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_engines_take_turns_after_one_run_each_that_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def started(engine: str, file: Path, threads: int, packages: Path | None) -> start.Parts:
        assert file.is_file()
        asked.append(engine)
        return {"imports": float(len(asked)), "first token": 1.0}

    monkeypatch.setattr(start, "start", started)
    found = measured(monkeypatch, tmp_path / "out.json", "--runs", "2")
    assert asked == ["weft", "llama.cpp"] * 3
    assert [run["imports"] for run in found["runs"]["weft"]] == [3.0, 5.0]
    assert [run["imports"] for run in found["runs"]["llama.cpp"]] == [4.0, 6.0]
    shown = capsys.readouterr().out
    assert "5.00 s (4.00 to 6.00): imports 4.00, first token 1.00" in shown
    assert "llama.cpp takes 1.20 times Weft's time (pairs 1.17 to 1.25)" in shown


def test_an_engine_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(engine: str, *rest: object) -> start.Parts:
        if engine == "llama.cpp":
            raise start.NotInstalled("llama.cpp is not installed")
        return {"imports": 1.0}

    monkeypatch.setattr(start, "start", started)
    found = measured(monkeypatch, tmp_path / "out.json", "--runs", "2")
    assert list(found["runs"]) == ["weft"]
    assert capsys.readouterr().out.count("not installed") == 1


@pytest.mark.slow
def test_a_start_with_a_real_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start, "ENGINES", ("weft",))
    found = measured(monkeypatch, tmp_path / "out.json", "--runs", "1", "--threads", "1")
    [parts] = found["runs"]["weft"]
    assert list(parts) == ["interpreter", "imports", "tokenizer", "weights", "engine", "first token"]
    assert all(seconds >= 0 for seconds in parts.values())
    assert found["file_bytes"] > 0


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)weft ended with status 1.*nowhere\.gguf"):
        start.start("weft", tmp_path / "nowhere.gguf", 1, None)
