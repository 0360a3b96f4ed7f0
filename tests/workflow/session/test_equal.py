"""A session gives what the same graph gives as a flow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import weft
from weft import ops
from weft.llm import LLM

FIELDS = {"good": {"type": "boolean"}}
GOOD = {"type": "object", "properties": FIELDS, "required": ["good"], "additionalProperties": False}
TOPICS = ["a lighthouse", "the sea"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("weft-tiny", num_pages=96, threads=1, dtype="float64", max_context=512) as made:
        yield made


@weft.semantic_function(max_tokens=8, temperature=0)
def story(topic: weft.Input, begin: weft.Output, end: weft.Output(seed=3, temperature=1.0)):
    """Begin a story of {{topic}}. {{begin}} Now end it. {{end}}"""


def everything(topic: Any) -> dict[str, Any]:
    """Conversations, a map, a loop and a switch."""
    told = story(topic)
    notes = ops.map(lambda part: ops.llm(f"Say {part} {told.end}", max_tokens=4, temperature=0), topic.split(" "))
    draft = ops.loop(lambda text: ops.llm(f"Revise: {text}", max_tokens=5, temperature=0), told.end, max_rounds=2)
    verdict = ops.llm(f"Is it good? {draft}", schema=GOOD, max_tokens=30, temperature=0)
    choice = ops.switch(verdict.good, {True: lambda: told.begin, False: lambda: ops.text(f"no {told.end}")})
    more = ops.llm([told.end.chat, ops.user("Go on.")], max_tokens=6, temperature=0)
    return {"notes": notes, "draft": draft, "verdict": verdict, "choice": choice, "more": more}


@pytest.mark.slow
def test_a_session_gives_what_a_flow_gives(llm: LLM) -> None:
    flow = weft.flow(everything)
    expected = [dict(result.outputs) for result in flow.run([{"topic": topic} for topic in TOPICS], llm)]
    with weft.session(llm) as session:
        made = [everything(ops.text(topic)) for topic in TOPICS]
        found = [{name: variable.get() for name, variable in each.items()} for each in made]
    assert found == expected
    with weft.session(llm):
        late = [{name: variable.get() for name, variable in everything(ops.text(topic)).items()} for topic in TOPICS]
    assert late == expected
    assert session.counts.calls.cached_tokens > 0
    assert llm.stats().num_sequences == 0
