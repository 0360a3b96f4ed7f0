"""What the web is to several tenants: lists of their own, and a share of connections and of threads for names."""

import asyncio
import gc
import socket
import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.programs.network.help import OK, Server
from weft.abi.errors import InvalidRequest, NetworkDenied, NetworkFailed
from weft.programs.network import resolver as resolving
from weft.programs.network.client import Network
from weft.programs.network.requests import HttpRequest
from weft.programs.network.resolver import Resolver


async def until(condition: object) -> None:
    """Wait for what the network or a thread brings about."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  what it waits for has no event
            await asyncio.sleep(0.001)


def test_a_tenant_may_have_a_list_of_its_own() -> None:
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Any number of requests on each connection."""
        connections.append(0)
        place = len(connections) - 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                connections[place] += 1
                writer.write(OK)
        except asyncio.IncompleteReadError:
            writer.close()

    async def test() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        entry, request = f"127.0.0.1:{port}", HttpRequest(url=f"http://127.0.0.1:{port}/")
        network = Network([f"alice@home={entry}", "bob=other.com", f"*:{port}"])
        alice, bob = network.of("alice@home"), network.of("bob")
        for _ in range(2):
            assert (await alice.fetch(request, ["*", entry])).status == 200
        assert connections == [2]
        # The connection is open, and its port on a list of bob's; the address is on alice's alone.
        for stranger in (bob, network):
            with pytest.raises(NetworkDenied, match="public internet"):
                await stranger.fetch(request, ["*", entry])
        with pytest.raises(NetworkDenied, match="this program"):
            await alice.fetch(request, ["other.com"])
        with pytest.raises(NetworkDenied, match="this server"):
            await alice.fetch(HttpRequest(url="http://other.com/"), ["*"])
        assert connections == [2]
        await network.close()
        server.close()

    asyncio.run(test())


@pytest.mark.parametrize("entry", ["alice=", "=host.com", "a b=host.com", "alice=*x", "alice=bob=host.com"])
def test_entries_of_tenants_that_cannot_be(entry: str) -> None:
    with pytest.raises(InvalidRequest):
        Network([entry])


def test_one_tenant_does_not_take_all_connections() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def answer(lines: list[bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
            if b"/slow" in lines[0]:
                await go_on.wait()
            writer.write(OK)

        async with Server(answer) as server:
            allow = [f"127.0.0.1:{server.port}"]
            network = Network(allow, tenant_connections=lambda tenant: 2)
            slow = HttpRequest(url=f"{server.origin}/slow")
            asked = [asyncio.create_task(network.of("a").fetch(slow, allow)) for _ in range(5)]
            await until(lambda: len(server.requests) == 2)
            assert (await network.of("b").fetch(HttpRequest(url=f"{server.origin}/"), allow)).status == 200
            hasty = HttpRequest(url=f"{server.origin}/slow", timeout_s=0.05)
            with pytest.raises(NetworkFailed, match="within"):  # waiting for a place is part of its time
                await network.of("a").fetch(hasty, allow)
            asked[0].cancel()
            await until(lambda: len(server.requests) == 4)
            go_on.set()
            assert [one.status for one in await asyncio.gather(*asked[1:])] == [200] * 4
            await network.close()
            del asked
            gc.collect()
            assert not list(network._shares)

    asyncio.run(test())


def test_names_are_resolved_on_threads_of_which_each_tenant_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "TENANT_THREADS", 2)
    go_on, guard = threading.Event(), threading.Lock()
    busy: Counter[str] = Counter()
    most: Counter[str] = Counter()

    def look(host: str, port: int) -> Sequence[str]:
        tenant = host[0]
        with guard:
            busy[tenant] += 1
            most[tenant] = max(most[tenant], busy[tenant])
        if tenant == "a":
            assert go_on.wait(30)
        with guard:
            busy[tenant] -= 1
        if host.endswith("gone"):
            raise socket.gaierror("no such host")
        return ["93.184.216.34"]

    async def test() -> None:
        resolver = Resolver(look)
        asked = [asyncio.create_task(resolver.resolve("a", f"a{number}", 80)) for number in range(6)]
        await until(lambda: busy["a"] == 2)
        for _ in range(5):
            assert await resolver.resolve("b", "b", 80) == ["93.184.216.34"]
        # Who gives up gives nothing back that a thread still works for.
        for task in asked[:3]:
            task.cancel()
        await asyncio.wait(asked[:3])
        with pytest.raises(socket.gaierror):
            await resolver.resolve("b", "b.gone", 80)
        assert (busy["a"], most["a"]) == (2, 2)
        go_on.set()
        assert await asyncio.gather(*asked[3:]) == [["93.184.216.34"]] * 3
        assert most["a"] == 2
        resolver.close()
        resolver.close()
        with pytest.raises(RuntimeError):
            await resolver.resolve("b", "b", 80)

    asyncio.run(test())


def test_the_network_resolves_names_on_behalf_of_the_tenant_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []

    async def resolve(self: Resolver, tenant: str, host: str, port: int) -> Sequence[str]:
        asked.append((tenant, host, port))
        raise OSError("no such host")

    monkeypatch.setattr(Resolver, "resolve", resolve)

    async def test() -> None:
        network = Network(["*"])
        for tenant in ("a", "b"):
            with pytest.raises(NetworkFailed, match="no such host"):
                await network.of(tenant).fetch(HttpRequest(url="https://host.com/"), ["*"])
        assert asked == [("a", "host.com", 443), ("b", "host.com", 443)]
        await network.close()

    asyncio.run(test())
