"""docs/python.md: its blocks run, and its tables have every method, option and field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.server.conftest import running
from weft.client import Client
from weft.llm.chats import ChatOptions
from weft.llm.results import CompletionOutput, Result

TEXT = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.M | re.S)
LLM_PART, CLIENT_PART = TEXT.split("\n## weft.client")


def methods(what: Any) -> set[str]:
    return {name for name in dir(what) if not name.startswith("_") and callable(getattr(what, name))}


def test_the_offline_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("One day a dog\nThe sun\n")
    names: dict[str, Any] = {}
    offline = [block for block in BLOCKS if ADDRESS not in block]
    assert len(offline) == 2
    for block in offline:
        exec(block, names)
    assert [len(result.text) > 0 for result in names["results"]] == [True]
    assert names["answer"].message["content"]


def test_the_block_of_the_client_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in BLOCKS if ADDRESS in block]
    with running() as server:
        exec(block.replace(ADDRESS, server.url), {})
    assert capsys.readouterr().out.startswith("finished 3 {")


def test_every_method_of_an_llm_is_in_the_table() -> None:
    named = set(re.findall(r"`(\w+)\(", re.sub(r"(?s)\*\*Options.*", "", LLM_PART)))
    assert methods(weft.LLM) - {"over", "workflow_host"} <= named


def test_every_option_and_field_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", LLM_PART))
    assert set(ChatOptions.__annotations__) | {"template"} <= named
    assert set(Result.__dataclass_fields__) | {name for name in dir(Result) if not name.startswith("_")} <= named
    assert set(CompletionOutput.__dataclass_fields__) <= named


def test_every_method_of_a_client_is_named() -> None:
    named = set(re.findall(r"`(?:client\.)?(\w+)(?:\([^`]*\))?`", CLIENT_PART))
    with Client(ADDRESS) as client:
        for part in (client.programs, client.runs, client.workflows):
            assert methods(part) <= named, part
    assert "sessions" in named
