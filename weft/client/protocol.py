"""Requests and answers, without a connection: what both clients send, and how they read what comes back.

Owns every path, field and error of the API that the clients use. `synchronous` and `asynchronous` only carry.
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
_event = msgspec.json.Decoder(RunEvent)


class Call(NamedTuple):
    """A request to be made."""

    method: str
    path: str
    json: Any = None
    content: bytes | None = None
    headers: Mapping[str, str] = {}


# The clients' own methods are called `list`.
Programs = list[Program]
Runs = list[Run]
LogEntries = list[LogEntry]


class Listed(msgspec.Struct, frozen=True):
    """A list, as the API sends all of them."""

    data: msgspec.Raw


def client_options(url: str, api_key: str | None, timeout_s: float | None) -> dict[str, Any]:
    """Of httpx, whichever client. Raises `ClientError` for an address that is none."""
    if not url.startswith(("http://", "https://")):
        raise ClientError(f"{url} is no address of a server: it begins with http:// or https://")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {
        "base_url": url.rstrip("/").removesuffix("/v1"),
        "headers": headers,
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S),
    }


def socket_address(url: str, run_id: str) -> str:
    """Where a run's WebSocket is."""
    parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
    return f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{parts.path}/v1/runs/{quote(run_id)}"


# ---- requests


def upload(name: str, source: str | bytes | Path) -> Call:
    """A path is read; text is Python; bytes are what they are. Raises `ClientError` for a file that cannot be read."""
    content = source.encode() if isinstance(source, str) else _read(source) if isinstance(source, Path) else source
    kind = "application/wasm" if content.startswith(b"\0asm") else "text/x-python"
    return Call("POST", "/v1/programs?" + urlencode({"name": name}), content=content, headers={"content-type": kind})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ClientError(f"{path} cannot be read: {error.strerror}") from error


def launch(
    program: str | None, args: Any, *, source: str | None = None, options: Mapping[str, Any], **how: bool
) -> Call:
    """A run of an uploaded program, or of a source. `options` are further fields, of which None means absent."""
    body = {"args": args, **{name: value for name, value in options.items() if value is not None}, **how}
    if program is not None:
        return Call("POST", f"/v1/programs/{quote(program, safe='@')}/runs", json=body)
    return Call("POST", "/v1/runs", json={"source": source, **body})


def program_call(method: str, program: str = "") -> Call:
    """About one program, or all."""
    return Call(method, "/v1/programs" + (f"/{quote(program, safe='@')}" if program else ""))


def run_call(method: str, run_id: str = "", what: str = "", json: Any = None) -> Call:
    """About one run, or all."""
    path = "/v1/runs" + (f"/{quote(run_id)}" if run_id else "") + (f"/{what}" if what else "")
    return Call(method, path, json=json)


# ---- answers


def checked(response: httpx.Response) -> bytes:
    """The body of a success. Raises `ServerError`. The response has been read."""
    if response.is_success:
        return response.content
    try:
        error = response.json()["error"]
        raise ServerError(response.status_code, str(error["message"]), code=error.get("code"), param=error.get("param"))
    except (ValueError, LookupError, TypeError):
        text = response.text[:200]
        raise ServerError(response.status_code, f"the server answered {response.status_code}: {text}") from None


def parsed(body: bytes, kind: type[T]) -> T:
    """An answer as a value. Raises `ClientError` for one that is not Weft's."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ClientError(f"the answer cannot be read, is this a server of Weft? {error}") from error


def programs_in(body: bytes) -> list[Program]:
    """A list of programs."""
    return parsed(bytes(parsed(body, Listed).data), list[Program])


def runs_in(body: bytes) -> list[Run]:
    """A list of runs."""
    return parsed(bytes(parsed(body, Listed).data), list[Run])


def logs_in(body: bytes) -> list[LogEntry]:
    """A list of log lines."""
    return parsed(bytes(parsed(body, Listed).data), list[LogEntry])


def finished(run: Run) -> Run:
    """A run that has finished. Raises `RunFailedError` for any other end."""
    if run.status != "finished":
        raise RunFailedError(run)
    return run


def event_in(frame: str | bytes) -> RunEvent:
    """One frame of a WebSocket, or the data of one event of a stream."""
    try:
        return _event.decode(frame)
    except msgspec.MsgspecError as error:
        raise ClientError(f"an event of the run cannot be read: {error}") from error


def event_of(line: str) -> RunEvent | None:
    """A line of a stream; None for those that tell nothing. Raises `ServerError` for the server's own last word."""
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return None
    if data.startswith('{"error"'):
        error = parsed(data.encode(), dict[str, dict[str, Any]])["error"]
        raise ServerError(200, str(error.get("message")), code=error.get("code"), param=error.get("param"))
    return event_in(data)


def command(kind: str, message: Any = None) -> str:
    """What is sent over a WebSocket."""
    return msgspec.json.encode({"type": kind, "message": message}).decode()


def unreachable(url: str, error: Exception) -> ClientError:
    """No server, or one that went away."""
    return ClientError(f"{url} does not answer: {error or type(error).__name__}; is `weft serve` running there?")


def refused(error: Exception) -> ClientError:
    """A WebSocket that was not accepted, as the answer that the server gave instead."""
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
    """A WebSocket that ends in another way than it should, as an error. Raises `ClientError`."""
    from websockets.exceptions import ConnectionClosedError

    try:
        yield
    except ConnectionClosedError as error:
        reason = error.rcvd.reason if error.rcvd is not None else "the connection was lost"
        raise ClientError(f"the server ended the attachment: {reason}") from error
