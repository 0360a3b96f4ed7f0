"""Small durable values by name, shared by the programs of a tenant. They outlive programs and server processes.

from weft.sdk import store

await store.put_json("seen", ["a", "b"])
await store.get_json("seen")
"""

from __future__ import annotations

import json
from typing import Any

from weft.abi.errors import InvalidRequest
from weft.abi.operations import Op
from weft.sdk.answers import Answer, json_of, nothing
from weft.sdk.calls import Blobs
from weft.sdk.channel import current
from weft.sdk.main import encode


def put(name: str, value: bytes) -> Answer[None]:
    """Store a value under a name, replacing an earlier value. It is durable once this has been awaited."""
    return Answer(current().ask(Op.STORE_PUT, _name(name), bytes(value)), nothing)


def get(name: str) -> Answer[bytes | None]:
    """The value stored under a name; None for an unknown name."""
    return Answer(current().ask(Op.STORE_GET, _name(name)), _value)


def delete(name: str) -> Answer[None]:
    """Delete a name. An unknown name is not an error."""
    return Answer(current().ask(Op.STORE_DELETE, _name(name)), nothing)


def names(prefix: str = "") -> Answer[list[str]]:
    """All names with a prefix, sorted."""
    return Answer(current().ask(Op.STORE_LIST, prefix.encode()), json_of)


def put_json(name: str, value: object) -> Answer[None]:
    """Store a JSON value under a name."""
    return put(name, encode(value, f"the value of {name}"))


async def get_json(name: str, default: Any = None) -> Any:
    """The JSON value stored under a name, or `default`. Raises `InvalidRequest` for a value that is not JSON."""
    value = await get(name)
    if value is None:
        return default
    try:
        return json.loads(value)
    except ValueError:
        raise InvalidRequest(f"the value of {name} is not JSON; read it with store.get", "name") from None


def _name(name: str) -> bytes:
    if not name:
        raise InvalidRequest("a value needs a name", "name")
    return name.encode()


def _value(blobs: Blobs) -> bytes | None:
    return blobs[1] if blobs[0] == b"\1" else None
