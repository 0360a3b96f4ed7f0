"""Web pages cannot use the browser of one of the machine's users to reach a server that asks for no key."""

from __future__ import annotations

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.server.conftest import RunningServer, running
from tests.server.test_requests import error_of

LOCAL = ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000", "app.localhost"]
MALFORMED = ["[::1].evil.example", "[::1]evil:80", "user@localhost", "localhost/a", "localhost:80:80"]
FOREIGN = [
    *MALFORMED,
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "192.168.0.1",
    "[::2]",
    "[",
    "",
    "@",
]


def get(server: RunningServer, host: str | None = None, origin: str | None = None) -> httpx.Response:
    given = {"host": host, "origin": origin}
    headers = {name: value for name, value in given.items() if value is not None}
    return httpx.get(server.url + "/v1/models", headers=headers)


def test_foreign_hosts_are_refused_on_loopback() -> None:
    with running() as server:
        assert {get(server, host).status_code for host in LOCAL} == {200}
        for host in FOREIGN:
            error = error_of(get(server, host), 403)
            assert error["code"] == "host_not_allowed"
            assert "allowed_hosts" in error["message"]
            assert repr(host) in error["message"]
        assert "'evil.example'" in error_of(get(server, "evil.example:8000"), 403)["message"]


def test_pages_of_foreign_origins_are_refused_on_loopback() -> None:
    with running(cors_origins=["https://friend.example"]) as server:
        for origin in ("http://localhost:3000", "http://127.0.0.1", "https://friend.example", server.url):
            assert get(server, origin=origin).status_code == 200
        for origin in ("http://evil.example", "null", "https://friend.example:8443", "http://[", "http://[::1].evil"):
            error = error_of(get(server, origin=origin), 403)
            assert error["code"] == "origin_not_allowed"
            assert "cors_origins" in error["message"]
        refused = server.post("/v1/runs/run-1/cancel", {}, headers={"origin": "http://evil.example"})
        assert refused.status_code == 403


def test_hosts_that_are_allowed() -> None:
    with running(allowed_hosts=["weft.lan"]) as server:
        assert get(server, "weft.lan:8000").status_code == 200
        assert get(server, "WEFT.LAN", origin="http://weft.lan:1234").status_code == 200
        assert get(server, "localhost").status_code == 200
        assert get(server, "other.lan").status_code == 403
    with running(allowed_hosts=["Weft.LAN.", "[fe80::1]"]) as server:
        assert {get(server, host).status_code for host in ("weft.lan", "WEFT.lan:80", "[FE80::1]:80")} == {200}
        assert {get(server, host).status_code for host in ("", "[", "lan", "[fe80::2]")} == {403}
    with running(allowed_hosts=["*.Weft.lan"]) as server:
        assert {get(server, host).status_code for host in ("a.weft.lan", "b.A.weft.LAN.:80")} == {200}
        assert {get(server, host).status_code for host in ("weft.lan", "aweft.lan", "weft.lan.example")} == {403}
    with running(allowed_hosts=["*"]) as server:
        assert get(server, "evil.example", origin="http://evil.example").status_code == 200


@pytest.mark.parametrize("settings", [{"api_keys": ["k"]}, {"host": "0.0.0.0"}])
def test_elsewhere_any_host_is_answered_unless_some_are_named(settings: dict) -> None:
    with running(**settings) as server:
        assert get(server, "any.example", origin="http://any.example").status_code in (200, 401)
    with running(allowed_hosts=["weft.lan"], **settings) as server:
        assert get(server, "any.example").status_code == 403


def test_websockets_check_their_page_everywhere() -> None:
    with running(host="0.0.0.0") as server, pytest.raises(InvalidStatus) as refused:
        connect(server.url.replace("http", "ws") + "/v1/runs/run-1", origin="http://evil.example").__enter__()
    assert refused.value.response.status_code == 403
