"""Requests and responses of the programs API, without a connection: both clients send the one and read the other.

Owns every path, field and error of the API that the clients use. `synchronous` and `asynchronous` do the transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import httpx
import msgspec

from weft.client.errors import ClientError, RunFailedError, ServerError
from weft.client.values import LogEntry, Program, Run, RunEvent

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 10.0
MAX_EVENT_BYTES = 64 << 20
MAX_IDLE_CONNECTIONS = 100
"""Connections that a client keeps open for its next requests. Those in use have no bound: each reader of a run holds
one until the run ends, and a bound makes further requests wait, without an error, for runs that may wait for them."""
_event = msgspec.json.Decoder(RunEvent)


class ApiCall(NamedTuple):
    """An HTTP request that is still to be sent."""

    method: str
    path: str
    json: Any = None
    content: bytes | None = None
    headers: Mapping[str, str] = {}


# Inside the clients, `list` is a method.
Programs = list[Program]
Runs = list[Run]
LogEntries = list[LogEntry]


class Listed(msgspec.Struct, frozen=True):
    """The form of every list of the API."""

    data: msgspec.Raw


def client_options(url: str, api_key: str | None, timeout_s: float | None) -> dict[str, Any]:
    """Return the options of both httpx clients. Raises `ClientError` for an address that is not http or https."""
    if not url.startswith(("http://", "https://")):
        raise ClientError(f"{url} is not the address of a server: it begins with http:// or https://")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {
        "base_url": url.rstrip("/").removesuffix("/v1"),
        "headers": headers,
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE_CONNECTIONS),
    }


def socket_address(url: str, run_id: str) -> str:
    """Return the address of a run's WebSocket."""
    parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
    return f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{parts.path}/v1/runs/{quote(run_id)}"


# ---- requests


def upload(name: str, source: str | bytes | Path) -> ApiCall:
    """Make an upload. A path is read, text is Python. Raises `ClientError` for a file that cannot be read."""
    content = source.encode() if isinstance(source, str) else _read(source) if isinstance(source, Path) else source
    kind = "application/wasm" if content.startswith(b"\0asm") else "text/x-python"
    return ApiCall("POST", "/v1/programs?" + urlencode({"name": name}), content=content, headers={"content-type": kind})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ClientError(f"{path} cannot be read: {error.strerror}") from error


def launch(
    program: str | None, args: Any, *, source: str | None = None, options: Mapping[str, Any], **how: bool
) -> ApiCall:
    """Make a launch of an uploaded program or of a source. `options` are further fields; None is left out."""
    body = {"args": args, **{name: value for name, value in options.items() if value is not None}, **how}
    if program is not None:
        return ApiCall("POST", f"/v1/programs/{quote(program, safe='@')}/runs", json=body)
    return ApiCall("POST", "/v1/runs", json={"source": source, **body})


def program_call(method: str, program: str = "") -> ApiCall:
    """Make a request about one program, or about all."""
    return ApiCall(method, "/v1/programs" + (f"/{quote(program, safe='@')}" if program else ""))


def run_call(method: str, run_id: str = "", what: str = "", json: Any = None) -> ApiCall:
    """Make a request about one run, or about all."""
    path = "/v1/runs" + (f"/{quote(run_id)}" if run_id else "") + (f"/{what}" if what else "")
    return ApiCall(method, path, json=json)


def sessions_call(limit: int, model: str | None) -> ApiCall:
    """Make a request for the sequences that wait."""
    asked = {"limit": limit} if model is None else {"limit": limit, "model": model}
    return ApiCall("GET", "/v1/sessions?" + urlencode(asked))


# ---- answers


def checked(response: httpx.Response) -> bytes:
    """Return the body of a successful response that was read. Raises `ServerError` for any other."""
    if response.is_success:
        return response.content
    try:
        error = response.json()["error"]
        raise ServerError(response.status_code, str(error["message"]), code=error.get("code"), param=error.get("param"))
    except (ValueError, LookupError, TypeError):
        text = response.text[:200]
        raise ServerError(response.status_code, f"the server answered {response.status_code}: {text}") from None


def parsed(body: bytes, kind: type[T]) -> T:
    """Decode a response body. Raises `ClientError` if it is not the response of a Weft server."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ClientError(f"the answer cannot be read, is this a server of Weft? {error}") from error


def listed(body: bytes, kind: type[T]) -> T:
    """Decode the items of a list as `kind`, such as `Programs`. Raises `ClientError`."""
    return parsed(bytes(parsed(body, Listed).data), kind)


def finished(run: Run) -> Run:
    """Return the run if it has finished. Raises `RunFailedError` for any other end."""
    if run.status != "finished":
        raise RunFailedError(run)
    return run


def event_in(frame: str | bytes) -> RunEvent:
    """Decode a frame of a WebSocket or the data of a server-sent event. Raises `ClientError`."""
    try:
        return _event.decode(frame)
    except msgspec.MsgspecError as error:
        raise ClientError(f"an event of the run cannot be read: {error}") from error


def event_data(line: str) -> str | None:
    """Return the data of a line of a stream; None if it has none. Raises `ServerError` if it holds an error."""
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return None
    if data.startswith('{"error"'):
        error = parsed(data.encode(), dict[str, dict[str, Any]])["error"]
        raise ServerError(200, str(error.get("message")), code=error.get("code"), param=error.get("param"))
    return data


def event_of(line: str) -> RunEvent | None:
    """Decode a line of a stream; None if it holds no event. Raises `ServerError` if it holds an error."""
    data = event_data(line)
    return None if data is None else event_in(data)


def command(kind: str, message: Any = None) -> str:
    """Encode a frame that is sent over a WebSocket."""
    return msgspec.json.encode({"type": kind, "message": message}).decode()


def unreachable(url: str, error: Exception) -> ClientError:
    """Make the error of a server that cannot be reached or that closed the connection."""
    return ClientError(f"{url} does not answer: {error or type(error).__name__}; is `weft serve` running there?")


def refused(error: Exception) -> ClientError:
    """Make the error of a WebSocket that was not accepted, from the server's HTTP response."""
    response = getattr(error, "response", None)
    if response is None:
        return ClientError(f"the run cannot be attached to: {error}")
    try:
        checked(httpx.Response(response.status_code, content=bytes(response.body or b"")))
    except ServerError as told:
        return told
    return ClientError(f"the run cannot be attached to: {error}")


@contextmanager
def closing_told() -> Iterator[None]:
    """Raise `ClientError` if the WebSocket is closed with an error."""
    from websockets.exceptions import ConnectionClosedError

    try:
        yield
    except ConnectionClosedError as error:
        reason = error.rcvd.reason if error.rcvd is not None else "the connection was lost"
        raise ClientError(f"the server ended the attachment: {reason}") from error
