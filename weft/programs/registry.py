"""Uploaded programs: each tenant's names, and the versions that they mean.

Owns what may be uploaded: checks of its name, size and kind, and the quota of each tenant; what a reference means. It
parses and runs nothing and does not know HTTP. `weft.store.programs` keeps what it accepts. The front holds the one
registry there is; its program host asks it for what a child names.

A version is its content: the same bytes are the same version under every name. A name is a list of versions, the
last of which is the one that is meant by it; `name@hash` and a bare hash mean one version, and a hash may be shortened
as long as only one version of the tenant begins so.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest, QuotaExceeded, UnknownProgram
from weft.store.database import Database
from weft.store.programs import ProgramKind, ProgramTable, ProgramVersion

WASM_MAGIC = b"\0asm\x01\0\0\0"
MIN_HASH_CHARS = 8
"""Of a shortened hash: fewer could be a name."""
HASH_CHARS = 64

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}\Z")
_HASH = re.compile(r"[0-9a-f]{8,64}\Z")


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """How much a tenant may upload."""

    max_programs: int = 1000
    """Versions, under all names."""
    max_bytes: int = 256 << 20
    """Of all its versions together."""
    max_source_bytes: int = 1 << 20
    """Of one Python file."""
    max_module_bytes: int = 16 << 20
    """Of one Wasm module."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """What is run: content, and what it is called."""

    kind: ProgramKind
    content: bytes
    hash: str
    name: str = ""
    """Empty where it was never uploaded."""
    trusted: bool = False
    """It is the operator's own, and may run without a sandbox. No uploaded program is."""


class Program(NamedTuple):
    """A name and its versions, oldest first."""

    name: str
    versions: list[ProgramVersion]

    @property
    def latest(self) -> ProgramVersion:
        """The version that the name means."""
        return self.versions[-1]


class Registry:
    """Uploads, lookups and deletions. Used from any thread; every method blocks and may raise `StorageFailed`."""

    def __init__(self, database: Database | None = None, quota: Quota | None = None):
        """`database` is opened when it is first needed, and closed with this; None: programs are kept in memory. Raises
        `StorageFailed` where its folder cannot be one."""
        self.quota = quota or Quota()
        self._database = database or Database()
        self._table = ProgramTable(self._database)
        self._database.exists()

    def upload(self, tenant: str, name: str, content: bytes, kind: ProgramKind | None = None) -> Program:
        """Add a version, which the name means from now on; `kind` is detected where it is not said. Whether it may be
        a program is known by then.

        The same content again only moves the name. Raises `InvalidRequest` for a name or content that cannot be, and
        `QuotaExceeded`; then nothing has changed.
        """
        check_name(name)
        code = checked_code(content, kind, self.quota, name)
        version = ProgramVersion(hash=code.hash, kind=code.kind, size_bytes=len(content), created_s=time.time())

        def check(count: int, used_bytes: int) -> None:
            if count >= self.quota.max_programs:
                raise QuotaExceeded(f"There are {count} versions, as many as are kept; delete some first.")
            if used_bytes + len(content) > self.quota.max_bytes:
                raise QuotaExceeded(
                    f"{len(content)} bytes more than the {used_bytes} there are exceed {self.quota.max_bytes}; delete "
                    "programs first."
                )

        return Program(name, self._table.add(tenant, name, version, content, check))

    def programs(self, tenant: str) -> list[Program]:
        """All names of a tenant, in alphabetical order."""
        return [Program(name, versions) for name, versions in self._table.names(tenant).items()]

    def find(self, tenant: str, reference: str) -> tuple[Program, ProgramVersion]:
        """The version that a name, `name@hash` or a hash means, and a name it has. Raises `UnknownProgram`."""
        name, at, short = reference.partition("@")
        versions = self._table.versions(tenant, name) if _NAME.match(name) else []
        if versions:
            hash = _one(short, [one.hash for one in versions], reference) if at else versions[-1].hash
        elif at or not _HASH.match(reference):
            raise _unknown(reference)
        else:
            known = self._table.beginning(tenant, reference)
            hash = _one(reference, known, reference)
            name = known[hash]
            versions = self._table.versions(tenant, name)
        found = next((one for one in versions if one.hash == hash), None)
        if found is None:
            raise _unknown(reference)  # another server has deleted it meanwhile
        return Program(name, versions), found

    def code(self, tenant: str, reference: str) -> Code:
        """What to run. Raises `UnknownProgram`."""
        program, version = self.find(tenant, reference)
        content = self._table.content(tenant, version.hash)
        if content is None:
            raise _unknown(reference)
        return Code(kind=version.kind, content=content, hash=version.hash, name=program.name)

    def delete(self, tenant: str, reference: str) -> list[str]:
        """Forget a name with all its versions, or one version under every name; the hashes that are gone.

        A version that another name has too stays. Raises `UnknownProgram`.
        """
        program, version = self.find(tenant, reference)
        by_name = program.name == reference.partition("@")[0]
        gone = self._table.remove(
            tenant, program.name if by_name else None, None if reference == program.name else version.hash
        )
        if gone is None:
            raise _unknown(reference)
        return gone

    def close(self) -> None:
        """Close the database. Blocks. Idempotent."""
        self._database.close()


def check_name(name: str) -> None:
    """Raise `InvalidRequest` for what cannot be a program's name."""
    if not _NAME.match(name):
        raise InvalidRequest(f"{name[:80]!r} is no name: a letter, then up to 63 of A-Z a-z 0-9 . _ -", "name")
    if _HASH.match(name):
        raise InvalidRequest(f"{name[:80]!r} would be taken for a hash; add another letter.", "name")


def checked_code(content: bytes, kind: ProgramKind | None, quota: Quota, name: str = "") -> Code:
    """Content of a size and kind that may be run. Raises `InvalidRequest`.

    Nothing of it is parsed here: `weft.programs.sandbox.checker` does that, in a process of its own.
    """
    looks_like: ProgramKind = "wasm" if content.startswith(b"\0asm") else "python"
    kind = kind or looks_like
    limit = quota.max_source_bytes if kind == "python" else quota.max_module_bytes
    if len(content) > limit:
        raise InvalidRequest(f"The program has {len(content)} bytes; {limit} is the limit of {kind}.", "source")
    if kind == "python":
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"The program is not UTF-8 text: {error}.", "source") from None
    elif not content.startswith(WASM_MAGIC):
        raise InvalidRequest("This is no core Wasm module of version 1: its first eight bytes are others.", "source")
    return Code(kind=kind, content=content, hash=hashlib.sha256(content).hexdigest(), name=name)


def _unknown(reference: str) -> UnknownProgram:
    return UnknownProgram(f"There is no program {reference[:80]!r}; upload it first, or see the list.", "program")


def _one(short: str, hashes: Iterable[str], reference: str) -> str:
    matching = [one for one in hashes if one.startswith(short)] if len(short) >= MIN_HASH_CHARS else []
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UnknownProgram(
            f"{len(matching)} programs have hashes that begin with {short}; give more of it.", "program"
        )
    raise UnknownProgram(
        f"There is no program {reference[:80]!r}; hashes have {MIN_HASH_CHARS} to {HASH_CHARS} characters.", "program"
    )
