"""HTTP requests through the program's host, which permits only the addresses of the program's allow-list.

from weft.sdk import http

page = await http.get("https://example.com/")
page.text
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.abi.errors import InvalidRequest, NetworkFailed
from weft.abi.operations import Op
from weft.sdk.answers import Answer, dump
from weft.sdk.calls import Blobs
from weft.sdk.channel import current
from weft.sdk.main import encode

TIMEOUT_S = 30.0
MAX_BYTES = 1 << 20
"""Default limit of a response's body, in bytes."""


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response with any status."""

    status: int
    headers: Mapping[str, str]
    """Header names are in lower case."""
    url: str
    """The final URL, after redirects."""
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is 200 to 299."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The body as text, in the declared charset or else UTF-8."""
        charset = "utf-8"
        for field in self.headers.get("content-type", "").split(";")[1:]:
            key, _, value = field.strip().partition("=")
            if key.lower() == "charset":
                charset = value.strip('"')
        try:
            return self.body.decode(charset, "replace")
        except LookupError:
            return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body decoded as JSON. Raises `InvalidRequest` for a body that is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise InvalidRequest(f"the answer of {self.url} (status {self.status}) is not JSON") from None

    def check(self) -> Response:
        """The response itself. Raises `NetworkFailed` unless its status is 200 to 299."""
        if not self.ok:
            raise NetworkFailed(f"{self.url} answered with status {self.status}")
        return self


def request(
    method: str,
    url: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BYTES,
) -> Answer[Response]:
    """Send a request. The awaited answer raises `NetworkDenied` for an address that is not allowed and `NetworkFailed`
    for a request without a complete response. A status of 400 or above is a response, not an error."""
    about = {
        "method": method.upper(),
        "url": url,
        "headers": dict(headers or {}),
        "timeout_s": timeout_s,
        "max_bytes": max_bytes,
    }
    return Answer(current().ask(Op.HTTP, dump(about), body), _response)


def get(url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> Answer[Response]:
    """Send a GET request and return its response."""
    return request("GET", url, headers=headers, timeout_s=timeout_s)


def post(
    url: str, body: object = b"", *, headers: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> Answer[Response]:
    """Send a POST request. A body of bytes or text is sent as it is, any other value as JSON."""
    fields = dict(headers or {})
    if isinstance(body, str):
        data = body.encode()
    elif isinstance(body, bytes | bytearray):
        data = bytes(body)
    else:
        data = encode(body, "the body of the request")
        if "content-type" not in {name.lower() for name in fields}:
            fields["content-type"] = "application/json"
    return request("POST", url, body=data, headers=fields, timeout_s=timeout_s)


def _response(blobs: Blobs) -> Response:
    about = json.loads(blobs[0])
    headers = {str(name).lower(): str(value) for name, value in dict(about.get("headers") or {}).items()}
    return Response(about["status"], headers, about.get("url", ""), blobs[1])
