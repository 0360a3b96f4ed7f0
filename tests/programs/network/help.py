"""A server on this machine, name servers that answer as tests say, and requests to them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from weft.programs.network.client import Network
from weft.programs.network.requests import HttpRequest, HttpResponse

Answer = Callable[[list[bytes], bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers requests as a test says, and remembers them."""

    def __init__(self, answer: bytes | Answer = OK):
        self.answer = answer
        self.requests: list[bytes] = []
        self.port = 0

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            self.requests.append(head + body)
            if callable(self.answer):
                await self.answer(lines, body, writer)
            else:
                writer.write(self.answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def names(**addresses: str | Sequence[str]) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    """A name server; an address that is a list is a new answer each time."""
    lists = {name.replace("_", "."): iter(found) for name, found in addresses.items() if not isinstance(found, str)}

    async def resolve(host: str, port: int) -> Sequence[str]:
        if host in lists:
            return [next(lists[host])]
        found = addresses.get(host.replace(".", "_"))
        if found is None:
            raise OSError(f"no such host {host}")
        return str(found).split()

    return resolve


async def fetch(network: Network, url: str, allow: Sequence[str] = ("*",), **changes: object) -> HttpResponse:
    entries = [*allow] if "*" not in allow else [*allow, f"*:{url.rpartition(':')[2].partition('/')[0]}"]
    entries = [entry for entry in entries if entry == "*" or not entry.startswith("*:") or entry[2:].isdecimal()]
    return await network.fetch(HttpRequest(url=url, **changes), entries)


def with_server(
    test: Callable[[Server, Network], Awaitable[None]], answer: bytes | Answer = OK, *allow: str, **resolve: object
) -> None:
    async def body() -> None:
        async with Server(answer) as server:
            network = Network(
                [f"127.0.0.1:{server.port}", *(entry.replace("PORT", str(server.port)) for entry in allow)],
                resolve=names(**resolve),
            )
            try:
                await test(server, network)
            finally:
                await network.close()

    asyncio.run(body())


async def flood(writer: asyncio.StreamWriter, piece: bytes, count: int) -> None:
    """Send pieces until the other side has had enough."""
    for _ in range(count):
        writer.write(piece * 1000)
        await writer.drain()
