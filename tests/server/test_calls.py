"""`/v1/calls` and `/v1/variables`: calls that run as they are submitted, bounded, and each tenant's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import pytest

from tests.server.conftest import ManualTimer, RunningServer, running
from tests.workflow.shapes import Json, body, function, llm, mapped, pick, text
from weft.abi.errors import InvalidRequest
from weft.config import WorkflowsConfig
from weft.workflow.service.service import WorkflowService

ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in "ab")


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running(api_keys=["alice=a", "bob=b"]) as server:
        yield server


@pytest.fixture
def alice(shared: RunningServer) -> Iterator[httpx.Client]:
    with shared.http(headers=ALICE) as client:
        yield client
        for session in {key[1] for key in shared.service.sessions._sessions if key[0] == "alice"}:
            client.delete(f"/v1/sessions/{session}")
    shared.assert_nothing_left()


def template(prompt: str = "Say {{what}} {{said}}", **fields: Any) -> Json:
    what = {"name": "what", "in_out": "in", "value": "hi"}
    said = {"name": "said", "in_out": "out", "sampling": {"max_tokens": 4, "temperature": 0}}
    return {"prompt": prompt, "placeholders": [what, said], **fields}


def submit(client: httpx.Client, call: Json) -> Json:
    answer = client.post("/v1/calls", json=call)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def ids(receipt: Json) -> dict[str, str]:
    return {variable["name"]: variable["id"] for variable in receipt["variables"]}


def error(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


def value(client: httpx.Client, id: str, query: str = "") -> Any:
    card = client.get(f"/v1/variables/{id}{query}").json()
    assert card["status"] == "ready", card
    return card["value"]


def test_a_template_is_submitted_and_its_value_waited_for(alice: httpx.Client) -> None:
    receipt = submit(alice, template(session_id="s1"))
    assert receipt["session_id"] == "s1"
    said = ids(receipt)["said"]
    plain = {"messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 4, "temperature": 0}
    expected = alice.post("/v1/chat/completions", json=plain).json()["choices"][0]["message"]["content"]
    assert value(alice, said) == expected
    assert value(alice, said, "?criterion=latency&timeout_s=60") == expected
    follow = template(session_id="s1")
    follow["placeholders"][0] = {"name": "what", "in_out": "in", "variable_id": said, "transforms": [{"slice": [0, 2]}]}
    again = submit(alice, follow)
    plain["messages"][0]["content"] = f"Say {expected[:2]}"
    expected = alice.post("/v1/chat/completions", json=plain).json()["choices"][0]["message"]["content"]
    assert value(alice, ids(again)["said"]) == expected


def test_several_outputs_are_one_conversation_and_are_transformed(alice: httpx.Client) -> None:
    call = template("Say {{what}} {{first}} then {{second}}", sampling={"max_tokens": 3, "temperature": 0})
    call["placeholders"][1:] = [
        {"name": "first", "in_out": "out"},
        {"name": "second", "in_out": "out", "transforms": [{"regex": "(?s)^(.)"}, {"split": "|"}]},
    ]
    variables = ids(submit(alice, call))
    assert list(variables) == ["first", "second"]
    assert len(value(alice, variables["second"])) == 1
    assert len(value(alice, variables["second"])[0]) == 1
    assert isinstance(value(alice, variables["first"]), str)


def test_texts_of_inputs_are_no_templates(alice: httpx.Client) -> None:
    call = template()
    call["placeholders"][0]["value"] = "{{call_1}} {{nothing}}"
    submit(alice, {**template(), "session_id": "t"})
    assert value(alice, ids(submit(alice, {**call, "session_id": "t"}))["said"])


def test_nodes_grow_the_graph_of_a_session(alice: httpx.Client) -> None:
    first = submit(alice, {"session_id": "n", "nodes": [text("a", "x y"), pick("b", "a", split=" ")]})
    assert value(alice, ids(first)["b"]) == ["x", "y"]
    inside = body(llm("say", "{{i}}", max_tokens=2, temperature=0), said="say")
    later = submit(alice, {"session_id": "n", "nodes": [mapped("m", "b", inside), function("j", "join", of="{{m}}")]})
    said = value(alice, f"{ids(later)['m']}.said")
    assert len(said) == 2
    assert value(alice, ids(later)["j"]) == "\n\n".join(said)
    chat = {"id": "c", "op": "llm", "messages": [{"chat": "o"}, {"role": "user", "content": "On."}], "max_tokens": 2}
    submit(alice, {"session_id": "n", "nodes": [llm("o", "{{a}}", max_tokens=2)]})
    assert isinstance(value(alice, ids(submit(alice, {"session_id": "n", "nodes": [chat]}))["c"]), str)


def test_values_from_outside(alice: httpx.Client) -> None:
    nodes = [{"id": "e", "op": "external"}, text("t", "got {{e}}"), {"id": "f", "op": "external"}, text("u", "{{f}}")]
    variables = ids(submit(alice, {"session_id": "e", "nodes": nodes}))
    pending = alice.get(f"/v1/variables/{variables['t']}?timeout_s=0.01").json()
    assert pending == {"id": variables["t"], "object": "variable", "status": "pending"}
    assert alice.put(f"/v1/variables/{variables['e']}", json={"value": None}).json()["status"] == "ready"
    assert value(alice, variables["t"]) == "got null"
    assert error(alice.put(f"/v1/variables/{variables['e']}", json={"value": 1})) == (409, "not_settable")
    assert error(alice.put(f"/v1/variables/{variables['t']}", json={"value": 1})) == (409, "not_settable")
    assert error(alice.put(f"/v1/variables/{variables['e']}.x", json={"value": 1})) == (409, "not_settable")
    for wrong in ({}, {"value": 1, "error": "x"}, {"value": None, "error": "x"}, {"valeu": 1}, []):
        assert alice.put(f"/v1/variables/{variables['f']}", json=wrong).status_code == 400
    alice.put(f"/v1/variables/{variables['f']}", json={"error": "she said no"})
    failed = alice.get(f"/v1/variables/{variables['u']}").json()
    assert failed["error"] == {"message": "f: she said no", "node": "f", "code": "RowError"}
    assert alice.get(f"/v1/variables/{variables['f']}").json()["error"] == failed["error"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "one of prompt and nodes"),
        (template(nodes=[]), "one of prompt and nodes"),
        ({"nodes": [], "raw": True}, "nodes cannot be combined"),
        (template("Say {{said}}"), "what: is not in the text"),
        (template("{{what}} {{other}} {{said}}"), "{{other}}: is not a parameter"),
        (template("{{what}} {{said}}", sampling={"temperature": "hot"}), "temperature"),
        (template(session_id="a b"), "session_id"),
        (template(model="none"), "'none' is not served"),
        ({"prompt": "x {{a}}", "placeholders": [{"name": "a b", "in_out": "out"}]}, "'a b' is not a name"),
        ({"prompt": "x", "placeholders": [{"name": "", "in_out": "in", "value": 0}]}, "'' is not a name"),
        ({"prompt": "x", "placeholders": [{"name": "class", "in_out": "out"}]}, "'class' is not a name"),
        ({"prompt": "x {{a}}", "placeholders": [{"name": "a", "in_out": "out"}] * 2}, "different names"),
        ({"prompt": "x {{a}}", "placeholders": [{"name": "a", "in_out": "out", "value": 1}]}, "a is an output"),
        ({"prompt": "x {{a}}", "placeholders": [{"name": "a", "in_out": "in", "schema": {}}]}, "a is an input"),
        ({"prompt": "x {{a}}", "placeholders": [{"name": "a", "in_out": "up"}]}, "in_out"),
        ({"nodes": [llm("a", "{{missing}}")]}, "there is no value 'missing'"),
        ({"nodes": [text("a"), text("a")]}, "'a' is given 2 times"),
        ({"nodes": [text("a", "{{b}}"), text("b", "{{a}}")]}, "cycle"),
        ({"nodes": [function("f", "count")]}, "f: a session on a server has no functions but"),
        ({"nodes": [text("l"), mapped("m", "l", body({"id": "e", "op": "external"}, o="e"))]}, "m"),
        ({"nodes": [text(f"t{number}") for number in range(501)]}, "500 nodes"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(alice: httpx.Client, call: Json, message: str) -> None:
    answer = alice.post("/v1/calls", json=call)
    assert answer.status_code in (400, 404), answer.text
    assert message in answer.json()["error"]["message"]


def test_calls_that_continue_a_session_begin_none(shared: RunningServer, alice: httpx.Client) -> None:
    assert error(alice.post("/v1/calls", json=template(continues=True))) == (400, None)
    named = template(session_id="later", continues=True)
    assert error(alice.post("/v1/calls", json=named)) == (410, "no_value")
    assert not shared.service.sessions._sessions
    submit(alice, {**named, "continues": False})
    with shared.http(headers=BOB) as bob:  # who has no session of that name
        assert error(bob.post("/v1/calls", json=named)) == (410, "no_value")
    assert submit(alice, named)["session_id"] == "later"


def test_an_id_is_used_once_in_a_session(alice: httpx.Client) -> None:
    submit(alice, {"session_id": "once", "nodes": [text("a")]})
    answer = alice.post("/v1/calls", json={"session_id": "once", "nodes": [text("b"), text("a")]})
    assert "a: is used in this session already" in answer.json()["error"]["message"]
    assert ids(submit(alice, {"session_id": "once", "nodes": [text("b")]})), "nothing of a refused request was kept"


@pytest.mark.parametrize("query", ["?timeout_s=0", "?timeout_s=x", "?timeout_s=nan", "?timeout_s=1e9",
                                   "?criterion=fast", "?criterion=deadline", "?deadline_s=3",
                                   "?criterion=latency&deadline_s=3"])  # fmt: skip
def test_wrong_queries_are_refused(alice: httpx.Client, query: str) -> None:
    variables = ids(submit(alice, {"session_id": "q", "nodes": [text(f"a{abs(hash(query))}")]}))
    (id,) = variables.values()
    assert alice.get(f"/v1/variables/{id}{query}").status_code == 400
    assert value(alice, id, "?criterion=deadline&deadline_s=5") == "x"


def test_tenants_have_their_own_sessions_and_variables(shared: RunningServer, alice: httpx.Client) -> None:
    mine = ids(submit(alice, {"session_id": "mine", "nodes": [text("a", "secret")]}))["a"]
    with shared.http(headers=BOB) as bob:
        assert error(bob.get(f"/v1/variables/{mine}")) == (404, "variable_not_found")
        assert error(bob.put(f"/v1/variables/{mine}", json={"value": 1})) == (404, "variable_not_found")
        assert error(bob.delete("/v1/sessions/mine")) == (410, "no_value")
        call = template(session_id="mine")
        call["placeholders"][0] = {"name": "what", "in_out": "in", "variable_id": mine}
        assert error(bob.post("/v1/calls", json=call)) == (404, "variable_not_found")
        theirs = ids(submit(bob, {"session_id": "mine", "nodes": [text("a", "other")]}))["a"]
        assert value(bob, theirs) == "other"
        bob.delete("/v1/sessions/mine")
    assert value(alice, mine) == "secret"
    other = template(session_id="another")
    other["placeholders"][0] = {"name": "what", "in_out": "in", "variable_id": mine}
    assert "another session" in alice.post("/v1/calls", json=other).json()["error"]["message"]


@pytest.mark.parametrize("id", ["var-", "var-x.a", "x", "var-000000000000000000000000.a", "var-a.b c", "%00"])
def test_what_is_no_variable_is_named(alice: httpx.Client, id: str) -> None:
    assert error(alice.get(f"/v1/variables/{id}")) == (404, "variable_not_found")


def test_the_end_of_a_session_says_why_there_are_no_values() -> None:
    with running(auto=False) as server, server.http() as client:
        nodes = [llm("a", "hi"), {"id": "e", "op": "external"}]
        variables = ids(submit(client, {"session_id": "s", "nodes": nodes}))
        server.wait_until(lambda: len(server.engine.sequences) == 1)
        found: list[httpx.Response] = []

        def wait() -> None:
            with server.http() as other:
                found.append(other.get(f"/v1/variables/{variables['a']}"))

        thread = threading.Thread(target=wait)
        thread.start()
        server.wait_until(lambda: any(each.is_waited_for for each in server.service.sessions._sessions.values()))
        ended = client.delete("/v1/sessions/s")
        thread.join()
        assert ended.json() == {"object": "session.ended", "id": "s"}
        assert error(found[0]) == (410, "no_value")
        server.assert_nothing_left()
        for answer in (client.get(f"/v1/variables/{variables['e']}"), client.get(f"/v1/variables/{variables['a']}")):
            assert error(answer) == (410, "no_value")
            assert "the session was ended" in answer.json()["error"]["message"]
        assert error(client.delete("/v1/sessions/s")) == (410, "no_value")
        assert client.put(f"/v1/variables/{variables['e']}", json={"value": 1}).status_code == 410


def test_a_client_that_goes_away_ends_nothing() -> None:
    with running(auto=False) as server, server.http() as client:
        (id,) = ids(submit(client, {"session_id": "s", "nodes": [llm("a", "hi", max_tokens=1)]})).values()
        sessions = server.service.sessions._sessions

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as gone:
                waiting = asyncio.ensure_future(gone.get(f"/v1/variables/{id}"))
                await asyncio.to_thread(
                    server.wait_until, lambda: any(each.is_waited_for for each in sessions.values())
                )
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

        asyncio.run(leave())
        server.wait_until(lambda: not next(iter(sessions.values())).is_waited_for)
        assert len(server.engine.sequences) == 1, "the call goes on"
        client.delete("/v1/sessions/s")
        server.assert_nothing_left()


def test_a_session_expires_when_nobody_asks_for_anything() -> None:
    timer = ManualTimer()
    workflows = partial(WorkflowService, config=WorkflowsConfig(session_idle_s=100.0))
    with running(timer=timer, workflows=workflows) as server, server.http() as client:
        nodes = [text("a", "x"), {"id": "e", "op": "external"}]
        variables = ids(submit(client, {"session_id": "s", "nodes": nodes}))
        sessions = server.service.sessions._sessions
        server.wait_until(lambda: bool(timer.sleepers))
        server.on_loop(lambda: timer.advance(60.0))
        assert value(client, variables["a"]) == "x"
        server.on_loop(lambda: timer.advance(60.0))
        server.wait_until(lambda: bool(timer.sleepers))
        assert value(client, variables["a"]) == "x", "a request keeps it"
        found: list[httpx.Response] = []

        def wait() -> None:
            with server.http() as other:
                found.append(other.get(f"/v1/variables/{variables['e']}"))

        thread = threading.Thread(target=wait)
        thread.start()
        server.wait_until(lambda: next(iter(sessions.values())).is_waited_for)
        server.on_loop(lambda: timer.advance(150.0))
        server.wait_until(lambda: bool(timer.sleepers))
        client.put(f"/v1/variables/{variables['e']}", json={"value": 7})
        thread.join()
        assert found[0].json()["value"] == 7, "one that waits keeps it too"
        server.on_loop(lambda: timer.advance(150.0))
        server.wait_until(lambda: not sessions)
        answer = client.get(f"/v1/variables/{variables['a']}")
        assert error(answer) == (410, "no_value")
        assert "expired after 100 s" in answer.json()["error"]["message"]


def test_sessions_and_bytes_of_a_tenant_are_bounded() -> None:
    config = WorkflowsConfig(max_sessions=2, max_session_bytes=3000)
    with (
        running(workflows=partial(WorkflowService, config=config), api_keys=["alice=a", "bob=b"]) as server,
        server.http(headers=ALICE) as client,
        server.http(headers=BOB) as bob,
    ):
        for label in "xy":
            submit(client, {"session_id": label, "nodes": [text("a")]})
        refused = client.post("/v1/calls", json={"session_id": "z", "nodes": [text("a")]})
        assert error(refused) == (403, "quota_exceeded")
        assert "max_sessions" in refused.json()["error"]["message"]
        submit(bob, {"session_id": "z", "nodes": [text("a")]})
        client.delete("/v1/sessions/y")
        large = submit(client, {"session_id": "z", "nodes": [{"id": "e", "op": "external"}]})
        client.put(f"/v1/variables/{ids(large)['e']}", json={"value": "x" * 2900})
        assert len(value(client, ids(large)["e"])) == 2900
        refused = client.post("/v1/calls", json={"session_id": "z", "nodes": [text("b")]})
        assert error(refused) == (403, "quota_exceeded")
        assert "max_session_bytes" in refused.json()["error"]["message"]
        submit(bob, {"session_id": "z", "nodes": [text("b")]})
        client.delete("/v1/sessions/z")
        submit(client, {"session_id": "z", "nodes": [text("b")]})


def test_a_server_that_stops_answers_those_who_wait() -> None:
    found: list[httpx.Response] = []
    with running(drain_s=0.01) as server:
        with server.http() as client:
            (id,) = ids(submit(client, {"session_id": "s", "nodes": [{"id": "e", "op": "external"}]})).values()

        def wait() -> None:
            with server.http() as other:
                found.append(other.get(f"/v1/variables/{id}"))

        thread = threading.Thread(target=wait)
        thread.start()
        server.wait_until(lambda: any(each.is_waited_for for each in server.service.sessions._sessions.values()))
        server.stop()
        thread.join()
    assert error(found[0]) == (503, "shutting_down")


def test_a_value_that_comes_while_the_server_stops_is_answered() -> None:
    found: list[httpx.Response] = []
    with running(auto=False, drain_s=60.0) as server:
        with server.http() as client:
            (id,) = ids(submit(client, {"session_id": "s", "nodes": [llm("a", "hi", max_tokens=1)]})).values()

        def wait() -> None:
            with server.http() as other:
                found.append(other.get(f"/v1/variables/{id}"))

        thread = threading.Thread(target=wait)
        thread.start()
        sessions = server.service.sessions._sessions
        server.wait_until(lambda: len(server.engine.sequences) == 1 and next(iter(sessions.values())).is_waited_for)
        server.server.loop.call_soon_threadsafe(server.server.begin_drain)
        server.wait_until(lambda: server.service.draining)
        server.on_loop(lambda: server.engine.step(9))
        thread.join()
    assert found[0].json()["status"] == "ready"


def test_a_schema_of_many_alternatives_holds_up_nothing(
    shared: RunningServer, alice: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.workflow.graph.schema_check.MAX_STEPS", 10_000)
    schema = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
    made = submit(alice, {"nodes": [{"id": "e", "op": "external", "schema": schema}]})
    refused = alice.put(f"/v1/variables/{ids(made)['e']}", json={"value": 1})
    assert error(refused) == (400, None)
    assert "more than 10,000 comparisons" in refused.json()["error"]["message"]


def test_refused_calls_leave_no_session_and_count_for_nothing(shared: RunningServer, alice: httpx.Client) -> None:
    sessions = shared.service.sessions._sessions
    for call in ({"nodes": [{"id": "a", "op": "nothing"}]}, template("{{what}} {{other}} {{said}}")):
        assert error(alice.post("/v1/calls", json=call))[0] == 400
        shared.wait_until(lambda: not sessions)
    submit(alice, template(session_id="mine"))
    before = shared.on_loop(lambda: sessions["alice", "mine"].num_bytes)
    assert error(alice.post("/v1/calls", json={"session_id": "mine", "nodes": [text("x" * 100)]}))[0] == 400
    shared.wait_until(lambda: not sessions["alice", "mine"].run._waiting)
    after = shared.on_loop(lambda: sessions["alice", "mine"].num_bytes)
    assert after - before < 100  # what calls have made since


def test_a_refused_request_does_not_end_the_session_that_another_has_begun(shared: RunningServer) -> None:
    """Both have the same new label, and the second one waits for its turn."""
    sessions = shared.service.sessions

    def refuse() -> bool:
        with suppress(InvalidRequest), sessions.submitting("alice", "both", 10) as session:
            session._num_waiting += 1
            raise InvalidRequest("refused")
        session._num_waiting -= 1
        return ("alice", "both") in sessions._sessions

    assert shared.on_loop(refuse)
    with shared.http(headers=ALICE) as client:
        client.delete("/v1/sessions/both")
    shared.assert_nothing_left()


def test_a_graph_that_loops_for_ever_keeps_nobody_waiting(alice: httpx.Client, shared: RunningServer) -> None:
    inside, outputs = text("t", "{{v4}}"), {"v4": "t"}
    for level in (4, 3, 2, 1):
        init = {f"v{level}": f"v{level - 1}"}
        inside = {"id": f"l{level}", "op": "loop", "init": init, "body": body(inside, **outputs), "max_rounds": 1000}
        outputs = {f"v{level - 1}": f"l{level}.v{level}"}
    submit(alice, {"session_id": "loops", "nodes": [text("v0", "x"), inside]})
    with shared.http(headers=BOB) as bob:
        assert value(bob, ids(submit(bob, {"session_id": "s", "nodes": [text("a", "x")]}))["a"]) == "x"
        bob.delete("/v1/sessions/s")
    assert alice.delete("/v1/sessions/loops").status_code == 200


def test_values_of_a_tenant_s_sessions_are_bounded() -> None:
    config = WorkflowsConfig(max_session_bytes=1 << 20)
    with running(workflows=partial(WorkflowService, config=config)) as server, server.http() as client:
        doubled = [text(f"t{n}", f"{{{{t{n - 1}}}}}{{{{t{n - 1}}}}}") for n in range(1, 20)]
        made = ids(submit(client, {"session_id": "s", "nodes": [text("t0", "x" * 1000), *doubled]}))
        card = client.get(f"/v1/variables/{made['t19']}").json()
        assert (card["status"], card["error"]["code"]) == ("failed", "limit_exceeded")
        assert "workflows.max_session_bytes" in card["error"]["message"]
        client.delete("/v1/sessions/s")
        (budget,) = [server.service.workflows.evaluations.of_sessions("")]
        assert budget.held_bytes == 0


def test_what_stays_of_a_refused_request_counts() -> None:
    """The calls of a template begin before what is taken of their outputs is refused."""
    config = WorkflowsConfig(max_session_bytes=20_000)
    with (
        running(workflows=partial(WorkflowService, config=config), auto=False) as server,
        server.http() as client,
    ):
        submit(client, {"session_id": "z", "nodes": [text("first")]})
        (session,) = server.service.sessions._sessions.values()
        num_first, codes = len(session._trace._nodes), []
        for number in range(8):
            made = {"name": "a", "in_out": "out", "transforms": [{"field": "x", "regex": "x"}]}
            prompt = f"{number} {'x' * 6000} {{{{a}}}}"
            codes.append(
                error(client.post("/v1/calls", json={"session_id": "z", "prompt": prompt, "placeholders": [made]}))
            )
        kept = len(session._trace._nodes) - num_first
        assert server.on_loop(lambda: session.num_bytes) >= kept * 6000
        assert codes[0][0] == 400
        assert kept == 0 or codes[-1] == (403, "quota_exceeded")


def test_the_prompt_of_a_call_is_sent_as_it_is(shared: RunningServer, alice: httpx.Client) -> None:
    prompt = "\n\tall: x.o\n\t\tgcc -o x\n    four"
    said = {"name": "said", "in_out": "out", "sampling": {"max_tokens": 1, "temperature": 0}}
    receipt = submit(alice, {"prompt": prompt + "{{said}}", "placeholders": [said], "raw": True, "session_id": "s"})
    assert alice.get(f"/v1/variables/{ids(receipt)['said']}").json()["status"] == "ready"
    assert prompt in {
        getattr(node, "prompt", None) for node in shared.service.sessions._sessions["alice", "s"]._trace._nodes.values()
    }
