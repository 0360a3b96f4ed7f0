"""Keys: every route asks for one, and no spelling of a path gets around that."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.server.conftest import RunningServer, running
from weft.abi.errors import ConfigError
from weft.endpoints.record import namespace_of
from weft.server.api_keys import find_tenant, parse_keys
from weft.server.auth import OPEN_PATHS

HEADERS = {"authorization": "Bearer key-of-alice"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    with running(api_keys=["alice=key-of-alice", "alice=second-key", "bob=key=with=equals", "bare-key"]) as server:
        yield server


def raw(server: RunningServer, head: str) -> str:
    """The status line and the rest, of a request that no client library tidied up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall((head + "\r\nHost: localhost\r\nConnection: close\r\n\r\n").encode("latin-1"))
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts).decode("latin-1")


def test_every_route_asks_for_a_key(guarded: RunningServer) -> None:
    asked = []
    with guarded.http() as client:
        for route in guarded.app.routes:
            path = route.path.replace("{model:path}", "fake-model").replace("{request_id}", "x")
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
                status = client.request(method, path).status_code
                if path in OPEN_PATHS:
                    assert status in (200, 405)
                else:
                    assert status == 401, (method, path)
                    assert client.request(method, path, headers=HEADERS).status_code != 401
                    asked.append(path)
    assert set(OPEN_PATHS) == {"/", "/docs", "/health", "/openapi.json", "/ready", "/version"}
    paths = {
        route.path.replace("{model:path}", "fake-model").replace("{request_id}", "x") for route in guarded.app.routes
    }
    assert set(asked) == paths - OPEN_PATHS


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/V1/MODELS",
        "/v1/models%20",
        "/v1/models%0a",
        "/%76%31/models",
        "/v1%2fmodels",
        "/health/../v1/models",
        "/health/..%2fv1/models",
        "/health%2f..%2fv1%2fmodels",
        "/health;/v1/models",
        "/health%00/v1/models",
        "/health/v1/models",
        "/./v1/models",
        "/health/",
        "/HEALTH",
        "/metrics?path=/health",
        "/metrics#/health",
        "http://x/v1/models",
        "http://x/health/../v1/models",
    ],
)
def test_path_confusion(guarded: RunningServer, target: str) -> None:
    answer = raw(guarded, f"GET {target} HTTP/1.1")
    assert answer.split(" ")[1] in ("401", "400"), answer
    assert "fake-model" not in answer


@pytest.mark.parametrize("target", ["*", "x", ""])
def test_odd_targets(guarded: RunningServer, target: str) -> None:
    assert raw(guarded, f"OPTIONS {target} HTTP/1.1").split(" ")[1] in ("400", "401")


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer  ",
        "Bearer key-of-alic",
        "Bearer key-of-alicee",
        "Bearer KEY-OF-ALICE",
        "Bearer alice=key-of-alice",
        "Bearer alice",
        "Basic key-of-alice",
        "key-of-alice",
        "Bearer key-of-alice,second-key",
        "Bearer \xff\xfe",
    ],
)
def test_wrong_keys(guarded: RunningServer, authorization: str) -> None:
    answer = raw(guarded, f"GET /v1/models HTTP/1.1\r\nAuthorization: {authorization}")
    assert answer.startswith("HTTP/1.1 401")
    assert "invalid_api_key" in answer
    assert "key-of-alice" not in answer


def test_two_keys_in_one_request(guarded: RunningServer) -> None:
    answer = raw(guarded, "GET /v1/models HTTP/1.1\r\nAuthorization: Bearer x\r\nAuthorization: Bearer key-of-alice")
    assert answer.startswith("HTTP/1.1 401")


@pytest.mark.parametrize("key", ["key-of-alice", "second-key", "key=with=equals", "bare-key"])
def test_right_keys(guarded: RunningServer, key: str) -> None:
    for scheme in ("Bearer", "bearer"):
        assert guarded.http().get("/v1/models", headers={"authorization": f"{scheme} {key}"}).status_code == 200


def test_tenants_and_salts_have_namespaces_of_their_own(guarded: RunningServer) -> None:
    def namespaces(key: str, **fields) -> str:
        guarded.on_loop(guarded.engine.sent.clear)
        body = {"prompt": "a", "max_tokens": 1} | fields
        answer = guarded.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        opened = guarded.on_loop(lambda: [c for c in guarded.engine.sent if type(c).__name__ == "Open"])[0]
        return opened.namespace

    alice = namespaces("key-of-alice")
    assert alice == namespaces("second-key")
    salted = namespaces("key-of-alice", cache_salt="s")
    others = [namespaces("key=with=equals"), namespaces("bare-key"), namespaces("bare-key", cache_salt="s")]
    assert len({alice, salted, *others}) == 5
    assert namespace_of('a","b', "c") != namespace_of("a", 'b","c')


def test_keys_are_compared_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = parse_keys(["a=1", "b=2", "c=3"])
    compared = []
    monkeypatch.setattr(
        "weft.server.api_keys.hmac.compare_digest", lambda x, y: compared.append(x) is not None or x == y
    )
    assert find_tenant(keys, b"1") == "a"
    assert len(compared) == 3


@pytest.mark.parametrize("entry", ["", "=", "name=", "na me=key", "name==", "key==", "=key", "x" * 65 + "=key"])
def test_keys_that_cannot_be_used(entry: str) -> None:
    with pytest.raises(ConfigError):
        parse_keys([entry])


def test_a_key_of_two_names() -> None:
    with pytest.raises(ConfigError, match="alice"):
        parse_keys(["alice=k", "bob=k"])
    assert len(parse_keys(["alice=k", "alice=k"])) == 1


def test_without_keys_nothing_is_asked(server: RunningServer) -> None:
    assert server.http().get("/v1/models").status_code == 200


def test_cors_preflight_needs_no_key_and_keeps_to_its_origins() -> None:
    with running(api_keys=["k"], cors_origins=["https://app.example"]) as server, server.http() as client:
        ask = {"origin": "https://app.example", "access-control-request-method": "POST"}
        preflight = client.options("/v1/chat/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        other = client.options("/v1/chat/completions", headers=ask | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = client.get("/v1/models", headers={"origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
