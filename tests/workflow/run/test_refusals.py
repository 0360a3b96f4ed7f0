"""What this process cannot evaluate is refused before a run makes its first call, all of it in one error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.workflow.shapes import body, function, graph, llm, mapped, pick
from weft import ops
from weft.llm import LLM
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow.graph import InvalidGraph
from weft.workflow.run.value_errors import NodeFailed

ROWS = [{"q": "one"}]
THERE = "run the graph there, with on=weft.client.Client(url), or a session with the address of one"
RAW = graph(
    llm("a", "{{q}}", max_tokens=3),
    pick("parts", "q", split=","),
    mapped("m", "parts", body(function("f", "score", x="{{i}}"), v="f")),
    {"id": "s", "op": "function", "source": "async def main(args): pass", "args": {"x": "{{a}}"}},
    {"id": "p", "op": "program", "program": "agent", "args": "{{a}}"},
    {"id": "e", "op": "external"},
    outputs={"m": "m", "s": "s", "p": "p", "e": "e"},
)
MISTAKES = {
    "m.f": "there is no function 'score' here",
    "s": f"functions with source run on servers of Weft only: {THERE}",
    "p": f"the program 'agent' runs on servers of Weft only: {THERE}",
    "e": "nothing can set 'e' here",
}


async def streamed(flow: Any) -> None:
    async for _ in flow.stream_async(ROWS, "http://127.0.0.1:9"):
        pass


def test_all_is_refused_before_the_first_call(tmp_path: Path) -> None:
    flow, out = weft.Workflow.load(RAW), tmp_path / "out.jsonl"
    out.write_text("of an earlier run")
    uses = [
        lambda: flow.run(ROWS, "http://127.0.0.1:9", out=out),
        lambda: list(flow.stream(ROWS, "http://127.0.0.1:9")),
        lambda: asyncio.run(streamed(flow)),
    ]
    for use in uses:
        with pytest.raises(InvalidGraph) as refused:
            use()
        found = {mistake.place: mistake.message for mistake in refused.value.mistakes}
        assert found.keys() == MISTAKES.keys()
        assert all(found[place].startswith(message) for place, message in MISTAKES.items())
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert out.read_text() == "of an earlier run"


def test_what_is_given_is_not_refused() -> None:
    raw = graph(function("f", "score", x="{{q}}"), {"id": "e", "op": "external"}, outputs={"f": "f", "e": "e"})
    flow = weft.Workflow.load(raw)
    results = flow.run(
        ROWS, "http://127.0.0.1:9", functions={"score": lambda x: f"{x}!"}, external=lambda asked: asked.node.id
    )
    assert results[0].outputs == {"f": "one!", "e": "e"}


def test_a_session_refuses_at_the_node() -> None:
    with LLM.over(FakeEngine, byte_tokenizer()) as made, weft.session(on=made) as session:
        answer, agent = ops.llm("Hi.", max_tokens=3), ops.program("agent", {})
        session.wait()
        assert answer.get()
        with pytest.raises(NodeFailed, match="the program 'agent' runs on servers of Weft only: run the graph there"):
            agent.get()
