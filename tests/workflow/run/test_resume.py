"""A run that was interrupted goes on: equal results, and at most what was in flight is done again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.workflow.run.interruption import Interrupted, interrupt_when
from tests.workflow.run.named_server import named_server
from weft import ops
from weft.abi.errors import ConfigError, InvalidRequest
from weft.llm import LLM
from weft.store.database import Database
from weft.store.workflow_runs import WorkflowRunTable
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow.backend.endpoint import EndpointBackend
from weft.workflow.run.calls import ModelAnswer
from weft.workflow.run.driver import Concurrency
from weft.workflow.run.journal import RunJournal

ROWS = [{"topic": f"topic {number}"} for number in range(4)]
CALLS: list[str] = []


def slow(text: str) -> str:
    CALLS.append(text)
    return text.upper()


stop_at: list[int] = []
"""Calls after which the run is interrupted."""


@pytest.fixture(autouse=True)
def interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    # Calls run on threads: there may be more by now.
    interrupt_when(lambda: bool(stop_at) and len(CALLS) >= stop_at[0], monkeypatch)


@weft.flow
def steps(topic: Any) -> Any:
    first = ops.function(slow, f"one {topic}")
    second = ops.function(slow, f"two {first}")
    return {"out": ops.function(slow, f"three {second}")}


@pytest.fixture
def llm() -> Any:
    made = LLM.over(FakeEngine, byte_tokenizer())
    yield made
    made.close()


@pytest.mark.parametrize("at", [1, 2, 5, 9, 12])
def test_what_was_done_is_not_done_again(at: int, llm: LLM, tmp_path: Path) -> None:
    expected = [{"out": f"THREE TWO ONE {row['topic'].upper()}"} for row in ROWS]
    out = tmp_path / "out.jsonl"
    CALLS.clear()
    stop_at[:] = [at]
    with pytest.raises(Interrupted):
        steps.run(ROWS, llm, out=out)
    stop_at.clear()
    done_before = len(CALLS)
    results = steps.run(ROWS, llm, out=out)
    assert [result.outputs for result in results] == expected
    assert results.errors == []
    # What a thread was doing when the run was interrupted may be done again.
    assert len(CALLS) - 12 <= 4
    assert len(CALLS) <= done_before + 12
    assert sorted(json.loads(line)["row"] for line in out.read_text().splitlines()) == [0, 1, 2, 3]
    assert not Path(f"{out}.run").exists()


def test_another_run_is_not_mixed_up_with_it(llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    stop_at[:] = [len(CALLS) + 3]
    with pytest.raises(Interrupted):
        steps.run(ROWS, llm, out=out)
    stop_at.clear()
    with pytest.raises(ConfigError, match=r"another rows: finish that run, remove .*out\.jsonl\.run"):
        steps.run(ROWS[:2], llm, out=out)
    other = weft.flow(lambda topic: ops.text(f"{topic}"))
    with pytest.raises(ConfigError, match="another graph"):
        other.run(ROWS, llm, out=out)
    assert len(steps.run(ROWS, llm, out=out)) == 4
    assert len(other.run(ROWS, llm, out=out)) == 4


def test_a_graph_with_other_ids_is_another_run(llm: LLM, tmp_path: Path) -> None:
    """Values are kept by the ids of nodes, and two swapped lines give each node the id of the other."""

    @weft.flow
    def before(topic: Any) -> Any:
        low, high = ops.function(slow, f"low {topic}"), ops.function(slow, f"high {topic}")
        return {"out": ops.function(slow, f"{low} {high}")}

    @weft.flow
    def swapped(topic: Any) -> Any:
        high = ops.function(slow, f"high {topic}")
        low = ops.function(slow, f"low {topic}")
        return {"out": ops.function(slow, f"{low} {high}")}

    out = tmp_path / "out.jsonl"
    interrupted(before, llm, out, 2)
    assert swapped.digest == before.digest
    with pytest.raises(ConfigError, match="another graph"):
        swapped.run(ROWS, llm, out=out)
    assert before.run(ROWS, llm, out=out).column("out")[0] == "LOW TOPIC 0 HIGH TOPIC 0"


def test_a_run_of_an_earlier_version_is_refused(llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    Path(f"{out}.run").mkdir()
    database = Database(Path(f"{out}.run"))
    WorkflowRunTable(database).begin("run", b'{"graph":"","rows":"","model":""}')
    database.close()
    with pytest.raises(ConfigError, match=r"another version of Weft .*: finish that run, remove .*out\.jsonl\.run"):
        steps.run(ROWS, llm, out=out)


def test_a_folder_of_the_user_s_is_left_alone(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "out.jsonl.run"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not of a run of a workflow"):
        steps.run(ROWS, llm, out=tmp_path / "out.jsonl")
    assert (folder / "mine.txt").read_text() == "mine"


def test_rows_that_had_failed_are_computed_again(llm: LLM, tmp_path: Path) -> None:
    is_there: list[str] = []
    asked: list[str] = []

    def look(text: str) -> str:
        asked.append(text)
        if text == "topic 1" and not is_there:
            raise ConnectionError("the library is closed")
        return text.upper()

    def go_on(text: str) -> str:
        if text == "TOPIC 3" and not is_there:
            CALLS.extend(["", ""])
        return text

    @weft.flow
    def looked(topic: Any) -> Any:
        return ops.function(go_on, ops.function(look, topic))

    out = tmp_path / "out.jsonl"
    CALLS.clear()
    stop_at[:] = [1]
    one_by_one = Concurrency(rows=1)
    with pytest.raises(Interrupted):
        looked.run(ROWS, llm, out=out, concurrency=one_by_one)
    stop_at.clear()
    assert "the library is closed" in out.read_text()
    is_there.append("now")
    results = looked.run(ROWS, llm, out=out, concurrency=one_by_one)
    assert results.column("value") == ["TOPIC 0", "TOPIC 1", "TOPIC 2", "TOPIC 3"]
    assert asked == ["topic 0", "topic 1", "topic 2", "topic 3", "topic 1"]
    assert [json.loads(line).get("error") for line in out.read_text().splitlines()] == [None] * 4


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ModelAnswer]:
    """The answers of calls that were really made."""
    answers: list[ModelAnswer] = []
    complete = EndpointBackend.complete

    async def noted(*arguments: Any) -> ModelAnswer:
        answers.append(await complete(*arguments))
        return answers[-1]

    monkeypatch.setattr(EndpointBackend, "complete", noted)
    return answers


def tokens_of(answers: list[ModelAnswer]) -> int:
    return sum(answer.usage.prompt_tokens + answer.usage.output_tokens for answer in answers)


def interrupted(flow: Any, llm: LLM, out: Path, at: int, **options: Any) -> None:
    """Run a flow, row by row, until so many functions have been called."""
    CALLS.clear()
    stop_at[:] = [at]
    with pytest.raises(Interrupted):
        flow.run(ROWS, llm, out=out, concurrency=Concurrency(rows=1), **options)
    stop_at.clear()


@weft.flow
def told(topic: Any) -> Any:
    return ops.function(slow, ops.llm(f"Tell me about {topic}.", max_tokens=8))


@pytest.mark.parametrize("limit", ["calls", "tokens"])
def test_limits_are_those_of_the_whole_run(limit: str, llm: LLM, tmp_path: Path, made: list[ModelAnswer]) -> None:
    told.run(ROWS[:3], llm)
    most = 3 if limit == "calls" else tokens_of(made)
    made.clear()
    limits = weft.RunLimits(**{limit: most})
    interrupted(told, llm, tmp_path / "out.jsonl", 2, limits=limits)
    assert len(made) == 2
    # Row 0 has ended, and row 1 has its answer.
    results = told.run(ROWS, llm, out=tmp_path / "out.jsonl", limits=limits)
    assert len(made) <= 3
    assert tokens_of(made) <= most or limit == "calls"
    assert {error.kind for error in results.errors} == {"limit_exceeded"}
    assert results.counts.calls.calls == len(made)


def test_counts_are_those_of_the_whole_run(
    llm: LLM, tmp_path: Path, made: list[ModelAnswer], capsys: pytest.CaptureFixture[str]
) -> None:
    def look(text: str) -> str:
        CALLS.append(text)
        if len(CALLS) == 2:
            raise ConnectionError("the library is closed")
        return text

    looked = weft.flow(lambda topic: ops.function(look, ops.llm(f"Tell me about {topic}.", max_tokens=8)))
    interrupted(looked, llm, tmp_path / "out.jsonl", 3)
    # Row 0 has ended, row 1 has failed, and row 2 has its answer.
    results = looked.run(ROWS, llm, out=tmp_path / "out.jsonl", progress=True)
    counts = results.counts
    assert (counts.rows, counts.failed_rows, counts.calls.calls, len(made)) == (4, 0, 5, 5)
    assert counts.by_node == {"llm_1": counts.calls}
    assert counts.calls.prompt_tokens + counts.calls.output_tokens == tokens_of(made)
    assert "4/4" in next(line for line in capsys.readouterr().err.splitlines() if "rows" in line)


def test_counts_are_kept_through_several_interruptions(llm: LLM, tmp_path: Path, made: list[ModelAnswer]) -> None:
    def look(text: str) -> str:
        CALLS.append(text)
        if stop_at and len(CALLS) < stop_at[0]:
            raise ConnectionError("the library is closed")
        return text

    looked = weft.flow(lambda topic: ops.function(look, ops.llm(f"Tell me about {topic}.", max_tokens=8)))
    for _ in range(2):
        # All rows but the last fail, and it is interrupted when it has its answer.
        interrupted(looked, llm, tmp_path / "out.jsonl", 4)
    results = looked.run(ROWS, llm, out=tmp_path / "out.jsonl")
    assert results.errors == []
    assert results.counts.calls.calls == len(made) == 3 + 3 + 3 + 1


def test_an_answer_of_equal_calls_is_kept_for_each_row(
    llm: LLM, tmp_path: Path, made: list[ModelAnswer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row whose call was sent ends, and the run is interrupted before the others do."""
    has_ended = threading.Event()
    end = RunJournal.end

    def noted(*arguments: Any) -> None:
        end(*arguments)
        has_ended.set()

    def look(text: str) -> str:
        CALLS.append(text)
        assert len(CALLS) == 1 or has_ended.wait(30)
        return text

    monkeypatch.setattr(RunJournal, "end", noted)
    shared = weft.flow(
        lambda topic: ops.function(look, f"{topic}: {ops.llm('Tell me something.', max_tokens=8, temperature=0)}")
    )
    options: dict[str, Any] = {"limits": weft.RunLimits(calls=1), "concurrency": Concurrency(functions=1)}
    CALLS.clear()
    stop_at[:] = [2]
    with pytest.raises(Interrupted):
        shared.run(ROWS, llm, out=tmp_path / "out.jsonl", **options)
    stop_at.clear()
    assert CALLS[0].startswith("topic 0")
    results = shared.run(ROWS, llm, out=tmp_path / "out.jsonl", **options)
    assert results.errors == []
    counts = results.counts.calls
    assert len(made) == counts.calls == 1
    assert counts.prompt_tokens + counts.output_tokens == tokens_of(made)
    assert {value.partition(": ")[2] for value in results.column("value")} == {made[0].text}


def test_another_model_at_an_address_is_another_run(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with named_server() as server:
        CALLS.clear()
        stop_at[:] = [2]
        with pytest.raises(Interrupted):
            told.run(ROWS, server.url, out=out, concurrency=Concurrency(rows=1))
        stop_at.clear()
        server.model = "two"
        with pytest.raises(ConfigError, match="another model"):
            told.run(ROWS, server.url, out=out)
        with pytest.raises(ConfigError, match="another model"):
            told.run(ROWS, server.url, out=out, model="three")
        server.model = "one"
        assert told.run(ROWS, server.url, out=out).column("value") == ["ONE SAYS"] * 4
        assert server.num_calls == 4
        shout = weft.flow(lambda topic: ops.function(slow, topic))
        listed = server.num_listed
        assert not shout.run(ROWS, server.url, out=out).errors
        assert server.num_listed == listed


@pytest.mark.parametrize("other_name", ["rows.jsonl", "linked.jsonl", "sub/../rows.jsonl"])
def test_the_file_of_the_rows_is_not_overwritten(other_name: str, llm: LLM, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"topic": "a"}\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "linked.jsonl").symlink_to(rows)
    with pytest.raises(InvalidRequest, match="is the file of the rows"):
        steps.run(rows, llm, out=tmp_path / other_name)
    assert rows.read_text() == '{"topic": "a"}\n'
    assert not list(tmp_path.glob("*.run"))


def test_a_folder_is_no_file_of_results(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is a folder: name a file in it"):
        steps.run(ROWS, llm, out=tmp_path)
    assert not Path(f"{tmp_path}.run").exists()


def test_two_runs_do_not_write_the_same_results(llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    refused: list[ConfigError] = []

    def again(text: str) -> str:
        with pytest.raises(ConfigError) as caught:
            nested.run(ROWS, llm, out=out)
        refused.append(caught.value)
        return text

    @weft.flow
    def nested(topic: Any) -> Any:
        return ops.function(again, topic)

    assert not nested.run(ROWS[:1], llm, out=out).errors
    assert "another run holds" in refused[0].message
    assert len(out.read_text().splitlines()) == 1
    assert not Path(f"{out}.run").exists()


SCRIPT = """
import os, sys, weft
from weft import ops

def work(text):
    with open(sys.argv[2], "a") as file:
        file.write("x")
    # Calls run on threads: one may see more than its own.
    if os.path.getsize(sys.argv[2]) >= float(os.environ["KILL_AT"]):
        os.kill(os.getpid(), 9)
    return text + "."

@weft.flow
def chain(q):
    first = ops.llm(f"Say {q}", max_tokens=3, temperature=0)
    value = ops.function(work, f"{q}{first}")
    for _ in range(3):
        value = ops.function(work, value)
    again = ops.llm([first.chat, ops.user(value)], max_tokens=3, temperature=0)
    return {"out": again, "value": value}

with weft.LLM("weft-tiny", threads=1, num_pages=128, max_context=256) as llm:
    results = chain.run([{"q": str(n)} for n in range(5)], llm, out=sys.argv[1], progress=False)
    assert not results.errors, results.errors
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(out: str, kill_at: float = math.inf) -> int:
        environment = {**os.environ, "KILL_AT": str(kill_at)}
        arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / out), str(tmp_path / f"{out}.count")]
        return subprocess.run(arguments, env=environment, check=False, timeout=120).returncode

    def read(out: str) -> list[Any]:
        return sorted(
            (json.loads(line) for line in (tmp_path / out).read_text().splitlines()), key=lambda line: line["row"]
        )

    assert run("whole") == 0
    assert run("killed", 9) == -signal.SIGKILL
    assert (tmp_path / "killed.run").exists()
    assert run("killed") == 0
    assert read("killed") == read("whole")
    done = len((tmp_path / "killed.count").read_text())
    # The functions of the other four rows run on threads, and may be counted before the process is gone.
    assert 20 <= done <= 20 + 9 + 4
    assert not (tmp_path / "killed.run").exists()
