"""What a run did: the sums are the engine's counters, and every form has it, with names of nodes escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from tests.server.conftest import RunningServer, running
from tests.server.test_workflow_runs import assert_nothing_left
from tests.workflow.shapes import graph, llm, text
from weft import ops
from weft.abi.errors import Unsupported
from weft.client import Client, ServerError
from weft.llm import LLM
from weft.workflow.actuals import MAX_TRACED_CALLS, CallCounts, CallTrace, RowTrace, RunActuals, RunCounts, figures_of
from weft.workflow.explain.report import Explanation
from weft.workflow.explain.svg import MAX_BARS, Bar, timeline_svg
from weft.workflow.graph import graph_from_dict
from weft.workflow.run.feed import CallStarted
from weft.workflow.run.ledger import CallLedger

ROWS = [{"topic": topic} for topic in ("a lighthouse at sea", "the moon", "a shell")]
SUMMED = ("prompt_tokens", "cached_tokens", "continued_tokens", "prefill_tokens", "output_tokens", "calls")


@weft.flow
def tell(topic: Any) -> Any:
    story = ops.llm([ops.system("You tell short stories to children."), ops.user(topic)], max_tokens=12, temperature=0)
    again = ops.llm([story.chat, ops.user("Go on.")], max_tokens=6, temperature=0)
    ops.llm("Nobody wants this.", max_tokens=4)
    return {"story": story, "again": again}


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM("weft-tiny", num_pages=96, threads=1, dtype="float32", max_context=512) as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running() as server:
        yield server


def test_the_sums_are_the_engine_s_counters(tiny: LLM) -> None:
    before = tiny.stats()
    results = tell.run(ROWS, on=tiny)
    after = tiny.stats()
    made = results.explain().to_dict()
    actual = made["actual"]
    assert actual["prompt_tokens"] == after.prompt_tokens - before.prompt_tokens
    assert actual["prefill_tokens"] == after.prefill_tokens - before.prefill_tokens
    assert actual["output_tokens"] == after.generated_tokens - before.generated_tokens
    assert actual["cached_tokens"] + actual["continued_tokens"] == after.prefix_hits - before.prefix_hits
    assert actual["calls"] == 6
    assert actual["continued_tokens"] > 0
    assert actual["prompt_tokens"] == sum(
        actual[name] for name in ("cached_tokens", "continued_tokens", "prefill_tokens")
    )
    for parts in (list(made["actual_by_node"].values()), made["timeline"]):
        for name in SUMMED:
            if parts is made["timeline"] and name in ("calls", "cached_tokens"):
                continue
            assert sum(part[name] for part in parts) == actual[name]
    assert len(made["timeline"]) == 6
    assert made["predicted"]["calls"] == 6
    assert set(made["predicted"]) == set(actual)
    assert actual["seconds"] > 0
    for call in made["timeline"]:
        assert 0 < call["sent_s"] <= call["started_s"] <= call["ended_s"]


def test_the_least_that_is_shown_is_that_of_the_calls_of_the_plan(tiny: LLM) -> None:
    results = tell.run([{"topic": "one and the same"}] * 3, on=tiny)
    assert results.counts.calls.merged_calls == 4
    made = results.explain()
    computed, least = made.to_dict()["actual"]["prefill_tokens"], made.to_dict()["predicted"]["min_prefill_tokens"]
    assert computed < least
    assert f"computed {computed} prompt tokens, found" in str(made)
    assert f"%; the 6 calls of the plan need {least} in any order" in str(made)


@weft.flow
def branched(topic: Any) -> Any:
    story = ops.llm([ops.system("You tell short stories to children."), ops.user(topic)], max_tokens=12, temperature=0)
    ends = [ops.llm([story.chat, ops.user(end)], max_tokens=6, temperature=0) for end in ("Go on.", "End it.")]
    last = ops.llm([ends[1].chat, ops.user("And then?")], max_tokens=6, temperature=0)
    return {"one": ends[0], "last": last}


@pytest.mark.parametrize("planning", [True, False])
def test_plan_usage_and_actuals_mean_the_same_by_continued(tiny: LLM, planning: bool) -> None:
    """Each branch of a conversation continues the turn before it: its prompt and its answer."""
    rows = [{"topic": f"{topic} and a {planning} friend"} for topic in ("a fox", "a whale", "an owl")]
    before = tiny.stats()
    results = branched.run(rows, on=tiny, planning=planning)
    after = tiny.stats()
    made = results.explain().to_dict()
    actual, by_node = made["actual"], made["actual_by_node"]
    assert actual["cached_tokens"] + actual["continued_tokens"] == after.prefix_hits - before.prefix_hits
    assert by_node["llm_1"]["continued_tokens"] == made["by_node"]["llm_1"]["continued_tokens"] == 0
    first, expected = by_node["llm_1"], made["by_node"]
    for node in ("llm_2", "llm_3", "llm_4"):
        # What a tokenizer makes of an answer may begin otherwise than the tokens that were generated.
        assert by_node[node]["continued_tokens"] >= first["prompt_tokens"] - 16 * len(rows)
        assert expected[node]["continued_tokens"] >= first["prompt_tokens"] - 16 * len(rows)
        assert by_node[node]["cached_tokens"] <= 16 * len(rows)
    assert results.counts.calls.continued_tokens == actual["continued_tokens"]


def test_starts_tell_what_the_engine_continues(tiny: LLM) -> None:
    rows = [
        {"topic": f"{topic}, told for the first time"} for topic in ("a cat", "a tree", "the rain", "snow", "bread")
    ]
    events = list(tell.stream(rows, on=tiny, starts=True))
    starts = {(event.row, event.node): event for event in events if isinstance(event, CallStarted)}
    assert len(starts) == 10
    num_continued = 0
    for row in range(5):
        first, second = starts[row, "llm_1"], starts[row, "llm_2"]
        assert first.continued_tokens == 0
        assert second.continued_tokens <= second.cached_tokens < second.prompt_tokens
        # An answer whose text has other tokens than those that were generated is not continued.
        num_continued += second.continued_tokens > first.prompt_tokens
    assert num_continued > 0


def test_text_and_diagrams_have_what_was_expected_and_what_was(tiny: LLM) -> None:
    made = tell.run(ROWS, on=tiny).explain()
    said = str(made)
    for part in ("prune: removed", "expected and actual", "time of calls", "pins", "3 rows ended, 0 failed", "took "):
        assert part in said
    assert "actual 3 calls" in made.mermaid()
    picture = ET.fromstring(made.svg())
    titles = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 6
    assert any(title.startswith("row 2 llm_2: ") for title in titles)
    before = tell.explain(ROWS, on=tiny)
    assert "actual" not in before.to_dict()
    assert ET.fromstring(before.svg()).tag == "{http://www.w3.org/2000/svg}svg"


def test_rows_that_cannot_be_read_again_cannot_be_explained(tiny: LLM) -> None:
    results = tell.run(iter(ROWS[:1]), on=tiny)
    with pytest.raises(Unsupported, match="iterator"):
        results.explain()


# ---- on a server


def test_before_a_run_and_after_it(shared: RunningServer) -> None:
    with Client(shared.url) as client:
        id = client.workflows.create(tell).id
        before = client.workflows.explain(id, ROWS)
        assert before["digest"] == id
        assert before["predicted"]["calls"] == 6
        assert {each["name"]: each["removed"] for each in before["passes"]}["prune"] == ["llm_3"]
        assert client.workflows.explain(id, 10, statistics={"topic": {"output_tokens": 4}})["predicted"]["calls"] == 20
        run = client.workflows.start(id, ROWS)
        for _ in client.workflows.events(run.id):
            pass
        after = client.workflows.explain_run(run.id)
        assert after["predicted"] == before["predicted"]
        progress = client.runs.get(run.id).workflow
        assert progress is not None
        assert after["actual"]["calls"] == progress["calls"]["calls"] == 6
        assert after["actual"]["output_tokens"] == progress["calls"]["output_tokens"]
        assert after["rows"] == {"done": 3, "failed": 0}
        assert sorted({call["row"] for call in after["timeline"]}) == [0, 1, 2]
        assert "expected and actual" in client.workflows.explain_run(run.id, "text")
        assert client.workflows.explain_run(run.id, "mermaid").startswith("flowchart TD")
        for picture in (client.workflows.explain_run(run.id, "svg"), client.workflows.explain(id, ROWS, "svg")):
            ET.fromstring(picture)
        with pytest.raises(ServerError, match="format is one of"):
            client.workflows.explain_run(run.id, "png")
        with pytest.raises(ServerError, match="nothing is called 'x'"):
            client.workflows.explain(id, ROWS, statistics={"x": {"output_tokens": 4}})
        with pytest.raises(ServerError, match="output_tokens: is -4; a number from 0"):
            client.workflows.explain(id, ROWS, statistics={"topic": {"output_tokens": -4}})
        with pytest.raises(ServerError, match="are explained at most"):
            client.workflows.explain(id, 10**6)
        with pytest.raises(ServerError, match="one of rows and num_rows"):
            client.workflows.explain(id, [])
        with shared.http() as http:
            response = http.get(f"/v1/runs/{run.id}/explain?format=svg")
            assert response.headers["content-type"].startswith("image/svg+xml")
            assert response.headers["content-security-policy"] == "default-src 'none'"
        client.workflows.delete(id)
        with pytest.raises(ServerError, match="no workflow"):
            client.workflows.explain_run(run.id)
    assert_nothing_left(shared)


def test_a_run_on_a_server_names_its_server(shared: RunningServer) -> None:
    with Client(shared.url) as client:
        results = tell.run(ROWS, on=client)
        with pytest.raises(Unsupported, match=r"explain_run\('wrun-"):
            results.explain()
    assert_nothing_left(shared)


# ---- what is shown


EVIL = '</title><script>alert(1)</script>" & \x00\ud800'


def test_names_of_nodes_are_text_in_a_picture() -> None:
    made = timeline_svg([Bar(EVIL, 0.0, 1.0, 2.0, f"row 0 {EVIL}")], EVIL, "s")
    assert "<script" not in made
    root = ET.fromstring(made)
    assert not [each for each in root.iter() if each.tag.endswith("script")]
    assert "script>alert(1)" in (next(root.iter("{http://www.w3.org/2000/svg}title")).text or "")


def test_calls_at_once_have_lanes_and_many_are_cut() -> None:
    bars = [Bar("a", start, start, start + 2.0, "") for start in (0.0, 0.0, 1.0, 2.0, 2.0)]
    root = ET.fromstring(timeline_svg(bars, "x", "s"))
    groups = list(root.iter("{http://www.w3.org/2000/svg}g"))
    lanes = [group[-1].get("y") for group in groups]
    assert len(set(lanes)) == 3
    assert lanes[3] == lanes[0]
    many = timeline_svg([Bar("a", at, at, at + 1.0, "") for at in range(MAX_BARS + 5)], "x", "s")
    assert "5 later bars are left out" in many
    ET.fromstring(timeline_svg([], "nothing", "s"))


def test_without_a_plan_the_rest_is_there() -> None:
    read = graph_from_dict(graph(llm("a", "{{q}}"), text("t", "{{a}}")))
    call = CallTrace("a", "a", 10, 4, 3, 6, 5, 1.0, 1.5, 3.0)
    counts = CallCounts(1, 0, 0, 10, 4, 5, 3, 6)
    actual = RunActuals(RunCounts(1, 0, counts, {"a": counts}), 2.5, (RowTrace(0, (call,)),))
    made = Explanation(read, None, actual, why_no_plan="the rows of the run are gone")
    said = str(made)
    assert "there is no plan: the rows of the run are gone" in said
    assert made.to_dict()["why_no_plan"] == "the rows of the run are gone"
    assert made.to_dict()["actual"] == figures_of(counts, 2.5)
    assert made.to_dict()["timeline"][0]["queue_s"] == 0.5
    assert made.mermaid().splitlines()[1] == '  n0["a<br/>actual 1 call, 5 tokens"]'
    ET.fromstring(made.svg())


def test_no_more_calls_are_kept_than_can_be_shown() -> None:
    ledger = CallLedger(RunCounts())
    call = CallTrace("a", "a", 1, 0, 0, 1, 1, 1.0, 1.0, 1.0)
    kept = 0
    for row in range(MAX_TRACED_CALLS // 1000 + 3):
        ledger.begin(row)
        for _ in range(1000):
            ledger.trace(row, call)
        kept += len(ledger.end(row, failed=False).traces)
    assert kept == MAX_TRACED_CALLS
