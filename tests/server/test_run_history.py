"""Runs that a server still knows after it was started again, and what it makes of limits of tenants and machine."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest

from tests.server.conftest import running
from weft.abi.errors import ConfigError, InvalidRequest
from weft.config import ProgramsConfig
from weft.core.clock import ManualClock
from weft.programs.host.process import host_parts
from weft.programs.quota.account import NoPlace
from weft.programs.quota.limits import Limits
from weft.programs.registry import Registry
from weft.programs.run_records import RunRecords
from weft.server.programs import ServedPrograms, resolved
from weft.store.database import FILE, Database
from weft.store.values import MemoryValueStore

ADD = "async def main(args):\n    return sum(args)\n"
FOREVER = "from weft.sdk import run\nasync def main(args):\n    return await run.receive()\n"
CHILD = """
from weft.sdk import messaging
async def main(args):
    return await messaging.launch(source="def main():\\n    return 1").join()
"""


def test_runs_are_listed_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "data"
    keys = ["alice=a", "bob=b"]
    alice, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
    with running(records=RunRecords(Database(path)), api_keys=keys, drain_s=0.0) as server, server.http() as client:
        good = client.post("/v1/runs", json={"source": ADD, "args": [1, 2]}, headers=alice).json()
        bad = client.post("/v1/runs", json={"source": ADD, "args": "x"}, headers=alice).json()
        parent = client.post("/v1/runs", json={"source": CHILD}, headers=alice).json()
        assert parent["status"] == "finished", parent
        gone = client.post("/v1/runs", json={"source": ADD, "args": []}, headers=alice).json()
        assert client.delete(f"/v1/runs/{gone['id']}", headers=alice).status_code == 200
        others = client.post("/v1/runs", json={"source": ADD, "args": [3]}, headers=bob).json()
        alive = client.post("/v1/runs", json={"source": FOREVER, "background": True}, headers=bob).json()
        listed = client.get("/v1/runs", headers=alice).json()["data"]

    with running(records=RunRecords(Database(path)), api_keys=keys) as server, server.http() as client:
        again = client.get("/v1/runs", headers=alice).json()["data"]
        assert [one["id"] for one in again] == [one["id"] for one in listed]
        assert [one["id"] for one in again][1:] == [parent["id"], bad["id"], good["id"]]
        assert again[0]["parent"] == parent["id"]
        assert [{**one, "forgotten": True} for one in listed] == again
        assert again[-2]["error"]["kind"] == "program_failed"
        assert again[-1]["usage"] == good["usage"]
        one = client.get(f"/v1/runs/{good['id']}", headers=alice).json()
        assert (one["result"], one["forgotten"], one["status"]) == (None, True, "finished")
        assert client.get(f"/v1/runs/{good['id']}/logs", headers=alice).json()["data"] == []
        follow = client.get(f"/v1/runs/{good['id']}/messages", headers=alice).text
        assert json.loads(follow.split("\n\n")[1].removeprefix("data: "))["type"] == "end"
        assert client.post(f"/v1/runs/{good['id']}/messages", json={"message": 1}, headers=alice).status_code == 409
        assert client.post(f"/v1/runs/{good['id']}/cancel", headers=alice).json()["status"] == "finished"
        assert client.get(f"/v1/runs/{others['id']}", headers=alice).status_code == 404
        mine = client.get("/v1/runs", headers=bob).json()["data"]
        assert [(one["id"], one["status"]) for one in mine] == [(alive["id"], "cancelled"), (others["id"], "finished")]
        assert client.delete(f"/v1/runs/{good['id']}", headers=alice).status_code == 200
        assert "weft:program_runs_total{" not in client.get("/metrics", headers=alice).text  # of this process
    with running(records=RunRecords(Database(path)), api_keys=keys) as server, server.http() as client:
        assert client.get(f"/v1/runs/{good['id']}", headers=alice).status_code == 404
        assert len(client.get("/v1/runs", headers=alice).json()["data"]) == len(listed) - 1


def test_a_run_that_the_server_took_with_it_is_listed_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    records = RunRecords(Database(path))
    with running(records=records, drain_s=0.0) as server, server.http() as client:
        run = client.post("/v1/runs", json={"source": FOREVER, "background": True}).json()
        server.wait_until(lambda: (path / FILE).exists() and len(_rows(path / FILE)) == 1)
        # What a server leaves that is killed now: the file as it is, and a lock that nobody holds.
        (tmp_path / "killed").mkdir()
        (tmp_path / "killed" / FILE).write_bytes(_copy(path / FILE))
        client.post(f"/v1/runs/{run['id']}/cancel")
    for _ in range(2):
        with running(records=RunRecords(Database(tmp_path / "killed"))) as server, server.http() as client:
            [lost] = client.get("/v1/runs").json()["data"]
            assert (lost["id"], lost["status"], lost["error"]["kind"]) == (run["id"], "failed", "host_dead")
            assert "start it again" in lost["error"]["message"]
            assert lost["finished"] >= lost["created"]


def _rows(path: Path) -> list[tuple[str]]:
    try:
        with sqlite3.connect(path) as database:
            return database.execute("SELECT id FROM runs WHERE server IS NOT NULL").fetchall()
    except sqlite3.Error:
        return []


def _copy(path: Path) -> bytes:
    """The database with what is in its log."""
    with sqlite3.connect(path) as source:
        return source.serialize()


def test_defaults_that_depend_on_machine_and_tenants() -> None:
    alone = resolved(ProgramsConfig(), 1, machine_bytes=1000)
    assert (alone.max_sandbox_bytes, alone.max_sandbox_bytes_per_tenant, alone.tenant_pages_fraction) == (4000, 4000, 1)
    shared = resolved(ProgramsConfig(), 2, machine_bytes=1000)
    assert (shared.max_sandbox_bytes, shared.max_sandbox_bytes_per_tenant) == (4000, 500)
    assert shared.tenant_pages_fraction == 0.5
    asked = ProgramsConfig(max_sandbox_bytes=100, max_sandbox_bytes_per_tenant=90, tenant_pages_fraction=0.9)
    assert resolved(asked, 5, machine_bytes=1000) == asked
    assert resolved(ProgramsConfig(max_sandbox_bytes=100), 5).max_sandbox_bytes_per_tenant == 50


def test_a_tenant_pays_for_the_checks_of_its_sources() -> None:
    charged: list[tuple[str, float]] = []

    class Host:
        def charge(self, tenant: str, cpu_s: float) -> None:
            charged.append((tenant, cpu_s))

        async def close(self) -> None:
            pass

    async def body() -> None:
        programs = ServedPrograms(ProgramsConfig(), Registry(), lambda programs: Host())
        await programs.upload("t", "p", b"async def main(args):\n    return 1\n", "python")
        with pytest.raises(InvalidRequest):
            await programs.inline_code("u", "def main(:")
        await programs.inline_code("t", "async def main(args):\n    return 1\n")  # the same content: known already
        await programs.close()
        assert [tenant for tenant, cpu_s in charged if cpu_s > 0] == ["t", "u"]

    asyncio.run(body())


def test_the_configuration_reaches_the_host() -> None:
    async def body() -> None:
        config = ProgramsConfig(
            max_sandbox_bytes=1,
            max_sandbox_bytes_per_tenant=2,
            tenant_pages_fraction=0.3,
            tenant_cpu_s_per_minute=4,
            tenant_host_calls_per_minute=5,
            tenant_tokens_per_minute=6,
            max_connections_per_tenant=7,
            tenants=[
                "a.l.tenant_tokens_per_minute=60",
                "a.l.max_connections_per_tenant = 8",
                "b.max_runs_per_tenant=1",
            ],
        )
        parts = host_parts([], config, MemoryValueStore(), guests=None, clock=ManualClock())
        with pytest.raises(InvalidRequest, match=r"have 2 together \(programs.max_sandbox_bytes_per_tenant\)"):
            parts.accounts.check_possible("c", Limits(memory_bytes=3))
        assert [parts.network._tenant_connections(tenant) for tenant in ("a.l", "b", "c")] == [8, 7, 7]
        alice, bob, other = (parts.accounts.open(tenant, Limits(memory_bytes=0)) for tenant in ("a.l", "b", "c"))
        for budget in (alice, other):
            budget.spend("tokens", 60)
        assert (alice.wait(), other.wait()) == (None, ("tokens", 6, 540))
        assert other.explicit_pages(100) == 30
        with pytest.raises(NoPlace, match="runs 1 programs"):
            parts.accounts.open("b", Limits(memory_bytes=0))
        for budget in (alice, bob, other):
            budget.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant_tokens_per_minute": 0},
        {"tenant_cpu_s_per_minute": float("nan")},
        {"max_sandbox_bytes": 0},
        {"max_connections_per_tenant": 0},
        {"tenant_pages_fraction": 1.1},
        {"max_kept_s": 0},
        {"tenants": ["alice.max_wall_s=1"]},
        {"tenants": ["max_runs_per_tenant=1"]},
        {"tenants": ["alice.max_runs_per_tenant=x"]},
        {"tenants": ["alice.max_runs_per_tenant=null"]},
        {"tenants": ["alice.tenant_tokens_per_minute=-1"]},
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="tenant" if "tenants" in wrong else next(iter(wrong))):
        ProgramsConfig(**wrong)
