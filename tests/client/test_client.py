"""Both clients against a real server: the same calls, the same values, the same errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import RunningServer, running
from tests.server.test_programs import ADD, ECHO, FOREVER, SMALLEST_MODULE, assert_no_runs
from weft.client import AsyncClient, Client, ClientError, RunFailedError, ServerError, asynchronous, synchronous


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running(api_keys=["alice=key"]) as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    yield shared
    assert_no_runs(shared)


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url + "/v1/", api_key="key") as client:
        yield client
        for program in client.programs.list():
            client.programs.delete(program.name)


def test_programs(client: Client, tmp_path: Path) -> None:
    (tmp_path / "add.py").write_text(ADD)
    first = client.programs.upload("add", tmp_path / "add.py")
    second = client.programs.upload("add", ADD + "#")
    assert client.programs.upload("module", SMALLEST_MODULE).kind == "wasm"
    assert [version.hash for version in client.programs.get("add").versions] == [first.hash, second.hash]
    assert [program.name for program in client.programs.list()] == ["add", "module"]
    run = client.programs.run(f"add@{first.hash[:10]}", [1, 2])
    assert (run.result, run.hash) == (3, first.hash)
    assert client.programs.run(source=ADD, args=[4, 5], limits={"cpu_s": 5}).result == 9
    client.programs.delete("add")
    with pytest.raises(ServerError) as error:
        client.programs.run("add", [1])
    assert (error.value.status, error.value.code) == (404, "program_not_found")
    with pytest.raises(ClientError, match="cannot be read: No such file"):
        client.programs.upload("x", tmp_path / "none.py")


def test_runs(client: Client) -> None:
    events = list(client.programs.stream(source=ECHO, args=1, messages=["hi"]))
    assert [event.type for event in events] == ["run", "message", "message", "end"]
    assert [event.message for event in events[1:3]] == [{"got": 1}, {"heard": "hi"}]

    run = client.programs.start(source=ECHO, args=2)
    assert run.status in ("queued", "running")
    assert not run.ended
    client.runs.send(run.id, "there")
    assert client.runs.wait(run.id).result == {"args": 2, "message": "there"}
    assert client.runs.get(run.id).ended
    assert client.runs.list()[0].id == run.id
    assert [line.text for line in client.runs.logs(run.id)] == ["started"]
    assert [event.type for event in client.runs.messages(run.id)][-1] == "end"
    client.runs.delete(run.id)
    with pytest.raises(ServerError, match="There is no run"):
        client.runs.get(run.id)
    waiting = client.programs.start(source=FOREVER)
    assert client.runs.cancel(waiting.id).status == "cancelled"


def test_separators_of_lines_and_paragraphs_in_texts(server: RunningServer, client: Client) -> None:
    text = "one\u2028two\u2029three\u0085four"
    events = list(client.programs.stream(source=ECHO, args=1, messages=[text]))
    assert events[2].message == {"heard": text}
    run = client.programs.start(source=f"async def main(args):\n    return {text!a}\n")
    assert client.runs.wait(run.id).result == text

    async def asynchronously() -> Any:
        async with AsyncClient(server.url, api_key="key") as aclient:
            return [event async for event in aclient.runs.messages(run.id)][-1].run

    assert asyncio.run(asynchronously()).result == text


def test_a_run_that_fails(client: Client) -> None:
    with pytest.raises(RunFailedError, match="no luck") as error:
        client.programs.run(source="def main(args):\n    raise ValueError('no luck')\n")
    assert "line 2, in main" in error.value.traceback
    assert error.value.run.status == "failed"


def test_leaving_a_stream_ends_its_run(client: Client) -> None:
    stream = client.programs.stream(source=FOREVER)
    first = next(stream)
    stream.close()
    assert first.run is not None
    with pytest.raises(RunFailedError, match="its client disconnected"):
        client.runs.wait(first.run.id)


def test_attaching(client: Client) -> None:
    run = client.programs.start(source=ECHO, args=1)
    with client.runs.attach(run.id) as attached:
        events = iter(attached)
        assert next(events).type == "run"
        assert next(events).message == {"got": 1}
        attached.send([1])
        assert next(events).message == {"heard": [1]}
        end = next(events)
        assert end.run is not None
        assert end.run.result == {"args": 1, "message": [1]}
        assert list(events) == []
    waiting = client.programs.start(source=FOREVER)
    with client.runs.attach(waiting.id) as attached:
        attached.cancel()
        assert [event.type for event in attached] == ["run", "end"]
    with pytest.raises(ServerError, match="There is no run") as error, client.runs.attach("run-0"):
        pass
    assert error.value.status == 404


def test_asynchronously(server: RunningServer, client: Client) -> None:
    async def test() -> None:
        async with AsyncClient(server.url, api_key="key") as aclient:
            await aclient.programs.upload("echo", ECHO)
            assert [program.name for program in await aclient.programs.list()] == ["echo"]
            events = [event async for event in aclient.programs.stream("echo", 1, messages=["hi"])]
            assert [event.type for event in events] == ["run", "message", "message", "end"]
            run = await aclient.programs.start("echo", 2)
            async with aclient.runs.attach(run.id) as attached:
                await attached.send("there")
                types = [event.type async for event in attached]
            assert types == ["run", "message", "message", "end"]
            assert (await aclient.runs.wait(run.id)).result == {"args": 2, "message": "there"}
            assert (await aclient.runs.list())[0].id == run.id
            assert [line.text for line in await aclient.runs.logs(run.id)] == ["started"]
            sums = await asyncio.gather(*(aclient.programs.run(source=ADD, args=[n, 1]) for n in range(20)))
            assert [one.result for one in sums] == list(range(1, 21))
            with pytest.raises(RunFailedError):
                await aclient.programs.run(source="def main(args): args['x']")
            waiting = await aclient.programs.start(source=FOREVER)
            assert (await aclient.runs.cancel(waiting.id)).status == "cancelled"
            with pytest.raises(ServerError):
                async with aclient.runs.attach("run-0"):
                    pass
            await aclient.programs.delete("echo")

    asyncio.run(asyncio.wait_for(test(), 60))


def test_strangers_and_nobody(server: RunningServer) -> None:
    with Client(server.url) as client, pytest.raises(ServerError, match="No valid API key") as error:
        client.programs.list()
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")
    with Client("http://127.0.0.1:1") as client:
        with pytest.raises(ClientError, match="is `weft serve` running there"):
            client.programs.list()
        with pytest.raises(ClientError, match="is `weft serve` running there"), client.runs.attach("run-0"):
            pass


def test_both_have_the_same_methods() -> None:
    for one, other in (
        (synchronous.Programs, asynchronous.AsyncPrograms),
        (synchronous.Runs, asynchronous.AsyncRuns),
        (synchronous.Attached, asynchronous.AsyncAttached),
    ):
        methods = {name for name in vars(one) if not name.startswith("_")}
        assert methods == {name for name in vars(other) if not name.startswith("_")}
        for name in methods:
            mine, theirs = (inspect.signature(getattr(kind, name)) for kind in (one, other))
            assert list(mine.parameters.values()) == list(theirs.parameters.values()), name


def test_a_client_opens_as_many_connections_as_it_has_requests() -> None:
    """No request is answered before all have arrived: with a bound on connections, none ever would."""
    num_requests = 120

    async def ends() -> list[str]:
        arrived = asyncio.Barrier(num_requests)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await arrived.wait()
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0, backlog=num_requests) as server:
            port = server.sockets[0].getsockname()[1]
            async with AsyncClient(f"http://127.0.0.1:{port}") as client:
                gets = (client.runs.get(f"run-{number}") for number in range(num_requests))
                ended = await asyncio.gather(*gets, return_exceptions=True)
        return [type(end).__name__ for end in ended]

    assert asyncio.run(ends()) == ["ServerError"] * num_requests
