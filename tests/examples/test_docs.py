"""Every block of docs/programs.md runs: trusted, in the sandbox, and, for the client, against a server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.help import EXAMPLES, Lab
from tests.server.conftest import running

TEXT = (Path(__file__).parents[2] / "docs" / "programs.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.M | re.S)
PROGRAMS = [block for block in BLOCKS if "async def main" in block and "weft.client" not in block]
CLIENTS = [block for block in BLOCKS if "weft.client" in block]
ARGS = {"question": "Who are you?", "url": "http://example.invalid/"}
SAYS = {
    "The first program": "Weft",
    "calculator": "81 * 47 = 3807.",
    "PERSON": '"Nora"',
    "messaging.subscribe": "rain",
    "NetworkDenied": "denied",
    "args * 2": "42",
    "while True": "limit_exceeded",
}
"""What a block with this in it returns something with."""


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("block", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_run(lab: Lab, block: str, trusted: bool) -> None:
    result, _ = lab.source(block, "example", ARGS, trusted=trusted)
    assert result
    for mark, says in SAYS.items():
        if mark in block:
            assert says in str(result)


@pytest.mark.parametrize("block", CLIENTS)
def test_clients_run(block: str) -> None:
    with running() as server:
        exec(block.replace("http://127.0.0.1:8000", server.url), {})
        server.wait_until(lambda: not list(server.service.programs.history.active()))


def test_all_blocks_are_one_or_the_other() -> None:
    assert len(PROGRAMS) + len(CLIENTS) == len(BLOCKS)
    assert len(PROGRAMS) >= 10
    assert len(CLIENTS) == 1


def test_the_table_has_every_example_with_its_lines() -> None:
    rows = {
        name: int(lines)
        for name, lines in re.findall(r"^\| \[`(\w+)`\]\([^)]*\) \|.*\| (\d+) \| [^|]* \|$", TEXT, flags=re.M)
    }
    assert rows == {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}


def test_links_lead_somewhere() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert link.startswith("https://") or (docs / link).exists(), link
