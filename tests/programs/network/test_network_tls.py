"""HTTPS of programs against a real TLS server: the connection goes to the address that was checked, and the certificate
is that of the name."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpcore
import pytest

from weft.abi.errors import NetworkFailed
from weft.programs.network import client as module
from weft.programs.network.client import Network
from weft.programs.network.requests import HttpRequest

ADDRESS = "93.184.216.34"
"""Of the public internet, as far as our checks go; connections to it come to the test's server."""


class Authority:
    """Self-signed certificates: a client that trusts one trusts no other."""

    def __init__(self, folder: Path):
        self._folder = folder
        found = shutil.which("openssl")
        if found is None:
            pytest.skip("needs the openssl command to make certificates")
        self._openssl = found

    def certificate(self, *names: str) -> tuple[Path, Path]:
        """Certificate and key for these names."""
        number = len(list(self._folder.glob("*.pem")))
        cert, key = self._folder / f"{number}.pem", self._folder / f"{number}.key"
        make = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ignored.example"]
        alternatives = ",".join(names)
        command = [self._openssl, *make, "-addext", f"subjectAltName={alternatives}", "-keyout", key, "-out", cert]
        subprocess.run(command, check=True, capture_output=True)
        return cert, key


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def good(authority: Authority) -> tuple[Path, Path]:
    return authority.certificate("DNS:good.example", "DNS:*.wild.example")


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Where connections went; all of them come to this machine."""
    where: list[tuple[str, int]] = []

    class Here(httpcore.AnyIOBackend):
        async def connect_tcp(self, host: str, port: int, *rest: object, **options: object) -> object:
            where.append((host, port))
            return await super().connect_tcp("127.0.0.1", port, *rest, **options)

    monkeypatch.setattr(module.httpcore, "AnyIOBackend", Here)
    return where


def with_tls(
    pair: tuple[Path, Path],
    trusted: Path | None,
    test: Callable[[Network, int, list[str | None]], Awaitable[None]],
    versions: tuple[ssl.TLSVersion, ssl.TLSVersion] | None = None,
) -> None:
    """A server with this certificate, and a network that trusts another (None: what the system trusts)."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        return [ADDRESS]

    async def body() -> None:
        named: list[str | None] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pair)
        context.sni_callback = lambda _, name, __: named.append(name)
        if versions is not None:
            context.minimum_version, context.maximum_version = versions

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            host = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"host:"))
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + host)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        tls = ssl.create_default_context(cafile=str(trusted)) if trusted is not None else None
        network = Network([f"*:{port}"], resolve=resolve, tls=tls)
        try:
            await test(network, port, named)
        finally:
            await network.close()
            server.close()

    asyncio.run(body())


def test_a_certificate_of_the_name_at_the_address_that_was_checked(
    good: tuple[Path, Path], connected: list[tuple[str, int]]
) -> None:
    async def test(network: Network, port: int, named: list[str | None]) -> None:
        for host in ("good.example", "GOOD.example.", "below.wild.example"):
            answer = await network.fetch(HttpRequest(url=f"https://{host}:{port}/"), [f"*:{port}"])
            plain = host.lower().removesuffix(".")
            assert (answer.status, answer.body.lower()) == (200, f"host: {plain}:{port}".encode())
            assert named[-1] == plain
        assert connected == [(ADDRESS, port)] * 3

    with_tls(good, good[0], test)


@pytest.mark.parametrize("host", ["bad.example", "wild.example", "a.b.wild.example", "ignored.example", ADDRESS])
def test_a_certificate_of_another_name_is_refused(
    host: str, good: tuple[Path, Path], connected: list[tuple[str, int]]
) -> None:
    async def test(network: Network, port: int, named: list[str | None]) -> None:
        with pytest.raises(NetworkFailed, match=rf"https://{host}:{port} failed: .*certificate.*(mismatch|not valid)"):
            await network.fetch(HttpRequest(url=f"https://{host}:{port}/"), [f"*:{port}"])
        assert connected == [(ADDRESS, port)]

    with_tls(good, good[0], test)


def test_a_certificate_that_nobody_vouches_for_is_refused(
    authority: Authority, good: tuple[Path, Path], connected: list[tuple[str, int]]
) -> None:
    other = authority.certificate("DNS:good.example")

    async def test(network: Network, port: int, named: list[str | None]) -> None:
        with pytest.raises(NetworkFailed, match=r"good.example.*certificate verify failed.*self.signed"):
            await network.fetch(HttpRequest(url=f"https://good.example:{port}/"), [f"*:{port}"])
        assert len(connected) == 1

    with_tls(good, other[0], test)
    connected.clear()
    with_tls(good, None, test)


def test_what_speaks_no_tls_or_too_old_a_version_is_refused(
    good: tuple[Path, Path], connected: list[tuple[str, int]]
) -> None:
    async def test(network: Network, port: int, named: list[str | None]) -> None:
        with pytest.raises(NetworkFailed, match=r"https://good.example"):
            await network.fetch(HttpRequest(url=f"https://good.example:{port}/"), [f"*:{port}"])
        with pytest.raises(NetworkFailed, match=r"http://good.example"):
            await network.fetch(HttpRequest(url=f"http://good.example:{port}/"), [f"*:{port}"])
        assert named in ([], ["good.example"])

    with pytest.warns(DeprecationWarning, match="TLSv1"):
        with_tls(good, good[0], test, (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1))
