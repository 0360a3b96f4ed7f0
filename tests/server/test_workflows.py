"""`/v1/workflows`: graphs on a server, by tenant and digest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.server.conftest import RunningServer, running
from tests.small_disk import small_disk
from tests.workflow.shapes import Json, body, graph, llm, mapped, text
from weft.config import WorkflowsConfig
from weft.store.database import Database
from weft.workflow.graph.digest import digest
from weft.workflow.graph.json import graph_from_dict
from weft.workflow.graph.nodes import MAX_NODES
from weft.workflow.service.service import WorkflowService

ASK = graph(llm("a", "Say {{q}}"))


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running(api_keys=["alice=a", "bob=b"]) as server:
        yield server


ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in "ab")


def test_create_get_list_delete(shared: RunningServer) -> None:
    with shared.http(headers=ALICE) as client:
        created = client.post("/v1/workflows", json={"graph": ASK, "name": "ask"}).json()
        assert created["id"] == created["hash"]
        assert (created["name"], created["inputs"], created["outputs"], created["nodes"]) == ("ask", ["q"], ["out"], 1)
        assert "graph" not in created
        same = graph(llm("other", "Say {{q}}"))
        again = client.post("/v1/workflows", json={"graph": same}).json()
        assert again == created
        renamed = client.post("/v1/workflows", json={"graph": same, "name": "new"}).json()
        assert renamed == created | {"name": "new"}
        other = client.post("/v1/workflows", json={"graph": graph(text("t", "{{q}}!"))}).json()
        listed = client.get("/v1/workflows").json()["data"]
        assert listed == [renamed, other]
        for id in (created["id"], created["id"][:8]):
            found = client.get(f"/v1/workflows/{id}").json()
            assert digest(graph_from_dict(found.pop("graph"))) == created["id"]
            assert found == renamed
        for wrong in (created["id"][:7], "zzzzzzzz", created["id"] + "0", "%00" * 8):
            missing = client.get(f"/v1/workflows/{wrong}")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "workflow_not_found")
        deleted = client.delete(f"/v1/workflows/{created['id'][:10]}").json()
        assert deleted == {"object": "workflow.deleted", "id": created["id"]}
        assert client.get(f"/v1/workflows/{created['id']}").status_code == 404
        assert client.get("/v1/workflows").json()["data"] == [other]
        client.delete(f"/v1/workflows/{other['id']}")


def test_tenants_do_not_see_each_other(shared: RunningServer) -> None:
    with shared.http() as client:
        mine = client.post("/v1/workflows", json={"graph": ASK, "name": "mine"}, headers=ALICE).json()
        assert client.get("/v1/workflows", headers=BOB).json()["data"] == []
        assert client.get(f"/v1/workflows/{mine['id']}", headers=BOB).status_code == 404
        assert client.delete(f"/v1/workflows/{mine['id']}", headers=BOB).status_code == 404
        theirs = client.post("/v1/workflows", json={"graph": ASK}, headers=BOB).json()
        assert (theirs["id"], theirs["name"]) == (mine["id"], "")
        client.delete(f"/v1/workflows/{mine['id']}", headers=ALICE)
        assert client.get(f"/v1/workflows/{mine['id']}", headers=BOB).status_code == 200
        client.delete(f"/v1/workflows/{mine['id']}", headers=BOB)


def test_all_mistakes_are_in_one_error(shared: RunningServer) -> None:
    raw = graph(llm("a", "{{missing}}"), llm("b", "{{a}}", temperature="hot"), {"id": "c", "op": "wrong"})
    answer = shared.post("/v1/workflows", {"graph": raw}, headers=ALICE)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert {mistake["place"] for mistake in error["mistakes"]} >= {"a.messages[0].content", "b.temperature"}
    assert error["param"] == error["mistakes"][0]["place"]
    assert all(mistake["message"] in error["message"] for mistake in error["mistakes"])
    assert any("wrong" in mistake["message"] for mistake in error["mistakes"])
    assert shared.http(headers=ALICE).get("/v1/workflows").json()["data"] == []


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({}, "graph"),
        ({"graph": []}, "graph"),
        ({"graph": {"version": 2}}, "version"),
        ({"graph": ASK, "nome": "x"}, "nome"),
        ({"graph": ASK, "name": "x" * 201}, "name"),
        ({"graph": ASK, "name": "a\nb"}, "name"),
    ],
)
def test_what_is_no_workflow_is_refused(shared: RunningServer, sent: Json, param: str) -> None:
    answer = shared.post("/v1/workflows", sent, headers=ALICE)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_as_many_nodes_as_may_be_and_one_more(shared: RunningServer) -> None:
    nodes = [text(f"t{number}", "{{q}}") for number in range(MAX_NODES - 1)]
    whole = graph(*nodes, text("last", "".join(f"{{{{t{number}}}}}" for number in range(10))))
    created = shared.post("/v1/workflows", {"graph": whole}, headers=ALICE).json()
    assert created["nodes"] == MAX_NODES
    shared.http(headers=ALICE).delete(f"/v1/workflows/{created['id']}")
    refused = shared.post("/v1/workflows", {"graph": graph(*nodes, text("x"), text("y"))}, headers=ALICE)
    assert refused.status_code == 400
    assert "10,000" in refused.json()["error"]["message"]
    deep: Json = body(text("x"), v="x")
    for _ in range(9):
        deep = body(mapped("m", "i", deep), v="m")
    refused = shared.post("/v1/workflows", {"graph": graph(mapped("m", "q", deep))}, headers=ALICE)
    assert "8 deep" in refused.json()["error"]["message"]


def test_a_tenant_stores_so_many_and_no_more() -> None:
    config = WorkflowsConfig(max_workflows=2, max_workflow_bytes=400)
    with running(workflows=partial(WorkflowService, config=config)) as server, server.http() as client:
        for number in range(2):
            assert client.post("/v1/workflows", json={"graph": graph(text("t", str(number)))}).status_code == 200
        refused = client.post("/v1/workflows", json={"graph": ASK})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "quota_exceeded")
        assert "workflows.max_workflows" in refused.json()["error"]["message"]
        assert client.post("/v1/workflows", json={"graph": graph(text("t", "1"))}).status_code == 200
        id = client.get("/v1/workflows").json()["data"][0]["id"]
        client.delete(f"/v1/workflows/{id}")
        refused = client.post("/v1/workflows", json={"graph": graph(text("t", "x" * 300))})
        assert "workflows.max_workflow_bytes" in refused.json()["error"]["message"]


def test_they_are_there_after_a_restart(tmp_path: Path) -> None:
    with running(workflows=partial(WorkflowService, database=Database(tmp_path))) as server:
        created = server.post("/v1/workflows", {"graph": ASK, "name": "ask"}).json()
    with running(workflows=partial(WorkflowService, database=Database(tmp_path))) as server, server.http() as client:
        assert client.get("/v1/workflows").json()["data"] == [created]


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "2m") as folder,
        running(workflows=partial(WorkflowService, database=Database(folder))) as server,
    ):
        created = server.post("/v1/workflows", {"graph": ASK}).json()
        refused = server.post("/v1/workflows", {"graph": graph(text("t", "x" * (4 << 20)))})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_failed")
        assert "the disk is full" in refused.json()["error"]["message"]
        assert server.http().get(f"/v1/workflows/{created['id']}").status_code == 200
