"""A disk that is full under a run: the run goes on, and one line says what is not kept."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.workflow.run.interruption import Interrupted, interrupt_when
from tests.workflow.shapes import graph, llm
from weft import ops
from weft.abi.errors import StorageFailed
from weft.llm import LLM
from weft.store import sqlite
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow.api import stream_on_loop
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.values import PartRanges
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.results import RowResult

LIMIT_PAGES = 64
VALUE_CHARS = 60_000
"""Twenty pages of the database or so."""
ROWS = [{"q": str(row)} for row in range(8)]
GOES_ON = "the run goes on; if it is interrupted, what could not be kept is computed again"
made: list[str] = []
stop_at: list[int] = []


def wide(text: str) -> str:
    made.append(text)
    return text * (VALUE_CHARS // len(text))


@weft.flow
def flow(q: Any) -> Any:
    return ops.function(wide, f"a{ops.function(wide, f'row {q}')[:9]}")


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    stop_at.clear()
    interrupt_when(lambda: bool(stop_at) and len(made) >= stop_at[0], monkeypatch)


@pytest.fixture
def model() -> Iterator[LLM]:
    with LLM.over(FakeEngine, byte_tokenizer()) as opened:
        yield opened


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Databases that are opened have room for `LIMIT_PAGES`. Returns what makes room for those opened later."""
    configure = sqlite._configure

    def limited(connection: Any, record: object) -> None:
        configure(connection, record)
        connection.execute(f"PRAGMA max_page_count = {LIMIT_PAGES}")

    monkeypatch.setattr(sqlite, "_configure", limited)
    return lambda: monkeypatch.setattr(sqlite, "_configure", configure)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("full_disk")
def test_a_run_goes_on_without_its_journal(model: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out.jsonl"
    expected = [result.outputs for result in flow.run(ROWS, model)]
    results = flow.run(ROWS, model, out=out)
    assert [result.outputs for result in results] == expected
    assert results.errors == []
    assert len(out.read_text().splitlines()) == len(ROWS)
    told = warnings(caplog)
    assert told.count(GOES_ON) == 1
    assert f"data in {out}.run cannot be written or read: the disk is full; free space in the folder of the run" in told
    assert not Path(f"{out}.run").exists()


def test_what_was_not_kept_is_computed_again(full_disk: Callable[[], None], model: LLM, tmp_path: Path) -> None:
    expected = [result.outputs for result in flow.run(ROWS, model)]
    made.clear()
    stop_at[:] = [14]
    out = tmp_path / "out.jsonl"
    with pytest.raises(Interrupted):
        flow.run(ROWS, model, out=out)
    stop_at.clear()
    made.clear()
    full_disk()
    results = flow.run(ROWS, model, out=out)
    assert [result.outputs for result in results] == expected
    assert results.errors == []
    assert 0 < len(made) < 2 * len(ROWS), "some values were kept, others were not"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_results_that_cannot_be_written_can_be_had_later(model: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.symlink_to("/dev/full")
    with pytest.raises(StorageFailed, match=f"{os.strerror(errno.ENOSPC)}; what was computed is kept: run it again"):
        flow.run(ROWS, model, out=out)
    out.unlink()
    results = flow.run(ROWS, model, out=out)
    assert results.errors == []
    assert len(out.read_text().splitlines()) == len(ROWS)
    assert len(made) < 2 * 2 * len(ROWS)


class LongAnswers:
    """A model whose answers are long."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
        self.num_asked += 1
        return ModelAnswer(request.body["messages"][0]["content"] * VALUE_CHARS)

    async def split(self, text: str, ranges: PartRanges) -> list[str]:
        raise NotImplementedError


@pytest.mark.usefixtures("full_disk")
def test_answers_that_do_not_fit_the_cache_are_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LongAnswers()

    async def results() -> list[RowResult]:
        asked = graph_from_dict(graph(llm("a", "{{q}}", temperature=0)))
        found = [result async for result in stream_on_loop(asked, ROWS, backend, cache=tmp_path)]
        return sorted(found, key=lambda result: result.row)

    first = asyncio.run(results())
    assert backend.num_asked == len(ROWS)
    second = asyncio.run(results())
    assert [result.outputs for result in second] == [result.outputs for result in first]
    assert not any(result.error for result in [*first, *second])
    assert len(ROWS) < backend.num_asked < 2 * len(ROWS), "some answers were kept, others were not"
    assert any("the disk is full; free space in the folder of the cache" in line for line in warnings(caplog))
