"""API keys as settings have them: which tenant a key identifies. Kept as digests."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NamedTuple

from weft.abi.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}\Z")


class ApiKey(NamedTuple):
    """The digest of a key, and the tenant that the key identifies."""

    digest: bytes
    tenant: str


def parse_keys(entries: list[str]) -> list[ApiKey]:
    """Parse entries of the form `name=key` or `key`. Keys may share a name, for rotation; a key has only one name.

    Raises `ConfigError` without repeating a key.
    """
    keys: dict[bytes, str] = {}
    for position, entry in enumerate(entries, 1):
        name, equals, key = entry.partition("=")
        if not equals:
            name, key = "", entry
        elif not _NAME.match(name):
            raise ConfigError(f"api_keys entry {position}: a name has 1 to 64 of A-Z a-z 0-9 . _ @ - before '='")
        if not key.strip("= \t"):
            raise ConfigError(f"api_keys entry {position} has no key; a key that contains '=' is written name=key")
        digest = _digest(key.encode())
        tenant = name or "key-" + digest.hex()[:12]
        if keys.get(digest, tenant) != tenant:
            raise ConfigError(f"api_keys entry {position}: the same key is given to {keys[digest]!r} and {tenant!r}")
        keys[digest] = tenant
    return [ApiKey(digest, tenant) for digest, tenant in keys.items()]


def find_tenant(keys: list[ApiKey], presented: bytes) -> str | None:
    """The tenant of a presented key. Compares every key, also after a match."""
    digest = _digest(presented)
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key.tenant
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
