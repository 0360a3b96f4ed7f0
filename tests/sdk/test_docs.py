"""Every example of docs/sdk.md runs, against the fake host."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

import weft.sdk
from tests.sdk.fake_host import FakeHost
from weft.sdk import api, main

TEXT = (Path(__file__).parents[2] / "docs" / "sdk.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.M | re.S)
ARGS = {"question": "Rain?", "url": "http://allowed/"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call>'


def run(source: str, function: str) -> Any:
    """What a function of an example returns, as JSON, and the host it ran on."""
    # The first reply calls a tool where there is one.
    host = FakeHost(*([CALL] if "tool_calls" in source else []), "It is so.")
    host.web["http://allowed/"] = (200, {}, b"page")

    def whole() -> Awaitable[bytes]:
        module = main.load(main.compiled(f"{source}\nmain = {function}", "example.py"))

        async def encoded() -> bytes:
            return main.encode_result(await main.call(module, ARGS))

        return encoded()

    return host.run(whole), host


def functions() -> list[tuple[str, str]]:
    return [
        (source, name) for source in EXAMPLES for name in re.findall(r"^async def (main|shorter)", source, flags=re.M)
    ]


@pytest.mark.parametrize(("source", "function"), functions())
def test_examples_run(source: str, function: str) -> None:
    result, host = run(source, function)
    assert result != b"null"
    # What was opened with `async with` alone was given back.
    host.sync()
    if "async with" in source and "= Context(" not in source and "Context()." not in source:
        assert host.sequences == {}


def test_there_are_examples_of_both_layers() -> None:
    assert len(functions()) >= 11


def test_the_agents_results() -> None:
    source = next(source for source in EXAMPLES if "def shorter" in source)
    assert run(source, "main")[0] == run(source, "shorter")[0] == b'"It is so."'


def test_the_page_names_what_the_library_has() -> None:
    """Names in code that look like the library's exist."""
    named = set(re.findall(r"`([A-Z]\w+)`", TEXT)) - {"None", "Generation"}
    missing = {
        name
        for name in named
        if not hasattr(weft.sdk, name) and name not in vars(weft.sdk.errors)  # type: ignore[attr-defined]
    }
    assert not missing
    for name in api.__all__:
        assert hasattr(api, name)
