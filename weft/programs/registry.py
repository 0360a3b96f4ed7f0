"""Uploaded programs: their bytes by content hash, and each tenant's names for them.

Owns what was uploaded: checks of its size and kind, the quota of each tenant, versions and names, and the folder where
all of it survives a restart. It parses and runs nothing and does not know HTTP. The front holds the one registry there
is; its program host asks it for what a child names.

A version is its content: the same bytes are the same version under whatever name. A name is a list of versions, the
last of which is the one that is meant by it; `name@hash` and a bare hash mean one version, and a hash may be shortened
as long as only one version of the tenant begins so.

Several servers may share a folder: a tenant's index is read again where another one has changed it, and changed by one
at a time.

On disk a tenant is a folder with `index.json` (names and versions, replaced as a whole) and a file of each version.
Content is written before the index names it and removed after the index has forgotten it, so whatever ends a process
leaves at most files that nothing names; they are removed at the next start.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest, QuotaExceeded, StorageFailed, UnknownProgram
from weft.programs.blob_store import BlobStore, MemoryBlobStore, Stamp

ProgramKind = Literal["python", "wasm"]

WASM_MAGIC = b"\0asm\x01\0\0\0"
MIN_HASH_CHARS = 8
"""Of a shortened hash: fewer could be a name."""
HASH_CHARS = 64

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}\Z")
_HASH = re.compile(r"[0-9a-f]{8,64}\Z")

logger = logging.getLogger("weft.programs")


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """How much a tenant may upload."""

    max_programs: int = 1000
    """Versions, under whatever names."""
    max_bytes: int = 256 << 20
    """Of all its versions together."""
    max_source_bytes: int = 1 << 20
    """Of one Python file."""
    max_module_bytes: int = 16 << 20
    """Of one Wasm module."""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a program, without its content."""

    hash: str
    """SHA-256 of its content, in hexadecimal."""
    kind: ProgramKind
    size_bytes: int
    created_s: float
    """When it was first uploaded, in seconds since 1970."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """What is run: content, and what it is called."""

    kind: ProgramKind
    content: bytes
    hash: str
    name: str = ""
    """Empty where it was never uploaded."""
    trusted: bool = False
    """It is the operator's own, and may run without a sandbox. Nothing that was uploaded is."""


class Program(NamedTuple):
    """A name and its versions, oldest first."""

    name: str
    versions: list[Version]

    @property
    def latest(self) -> Version:
        """The version that the name means."""
        return self.versions[-1]


class Index(msgspec.Struct, kw_only=True):
    """All that is known of a tenant's programs but their content."""

    versions: dict[str, Version] = {}
    """By hash."""
    names: dict[str, list[str]] = {}
    """Name -> hashes, oldest first; the last is the latest."""

    def copy(self) -> Index:
        """One that may be changed without this one."""
        return Index(versions=dict(self.versions), names={name: list(hashes) for name, hashes in self.names.items()})


class Registry:
    """See the module's docstring. `blobs` keeps bytes; by default in memory.

    Not for several threads at once: callers that leave the event loop hold a lock around what changes it.
    """

    def __init__(self, blobs: BlobStore | None = None, quota: Quota | None = None):
        self.quota = quota or Quota()
        self._blobs = blobs or MemoryBlobStore()
        self._known: dict[str, tuple[Stamp, Index]] = {}
        """By tenant: its index, and the stamp of what it was read from."""
        self._damaged: set[str] = set()
        """Tenants whose index could not be read: nothing of theirs is removed."""
        for tenant in self._blobs.tenants():
            self._open(tenant)

    def upload(self, tenant: str, name: str, content: bytes, kind: ProgramKind | None = None) -> Program:
        """Add a version, which the name means from now on; `kind` is detected where it is not said. Whether it may be
        a program is known by then.

        The same content again only moves the name. Raises `InvalidRequest` for a name or content that cannot be,
        `QuotaExceeded`, or `StorageFailed`; then nothing has changed.
        """
        check_name(name)
        code = checked_code(content, kind, self.quota, name)
        with self._blobs.changing(tenant):
            index = self._index(tenant).copy()
            if code.hash not in index.versions:
                self._check_quota(index, len(content))
                index.versions[code.hash] = Version(
                    hash=code.hash, kind=code.kind, size_bytes=len(content), created_s=time.time()
                )
                self._blobs.put(tenant, code.hash, content)
            hashes = index.names.setdefault(name, [])
            if code.hash in hashes:
                hashes.remove(code.hash)
            hashes.append(code.hash)
            self._commit(tenant, index)
            return _program(index, name)

    def programs(self, tenant: str) -> list[Program]:
        """All names of a tenant, in alphabetical order."""
        index = self._index(tenant)
        return [_program(index, name) for name in sorted(index.names)]

    def find(self, tenant: str, reference: str) -> tuple[Program, Version]:
        """The version that a name, `name@hash` or a hash means, and a name it has. Raises `UnknownProgram`."""
        return self._find(self._index(tenant), reference)

    @staticmethod
    def _find(index: Index, reference: str) -> tuple[Program, Version]:
        name, at, short = reference.partition("@")
        if name in index.names:
            hashes = index.names[name]
            found = _one(short, hashes, reference) if at else hashes[-1]
            return _program(index, name), index.versions[found]
        if at or not _HASH.match(reference):
            raise UnknownProgram(
                f"There is no program {reference[:80]!r}; upload it first, or see the list.", "program"
            )
        found = _one(reference, index.versions, reference)
        owner = next(name for name, hashes in sorted(index.names.items()) if found in hashes)
        return _program(index, owner), index.versions[found]

    def code(self, tenant: str, reference: str) -> Code:
        """What to run. Raises `UnknownProgram` or `StorageFailed`."""
        program, version = self.find(tenant, reference)
        content = self._blobs.get(tenant, version.hash)
        return Code(kind=version.kind, content=content, hash=version.hash, name=program.name)

    def delete(self, tenant: str, reference: str) -> list[str]:
        """Forget a name with all its versions, or one version under every name; the hashes that are gone.

        A version that another name has too stays. Raises `UnknownProgram` or `StorageFailed`.
        """
        self.find(tenant, reference)  # or there may be no such tenant, whose folder would be made
        with self._blobs.changing(tenant):
            index = self._index(tenant).copy()
            program, version = self._find(index, reference)
            if reference == program.name:
                del index.names[program.name]
            else:
                names = [program.name] if "@" in reference else list(index.names)
                for name in names:
                    kept = [one for one in index.names[name] if one != version.hash]
                    if kept:
                        index.names[name] = kept
                    else:
                        del index.names[name]
            used = {one for hashes in index.names.values() for one in hashes}
            gone = sorted(set(index.versions) - used)
            for one in gone:
                del index.versions[one]
            self._commit(tenant, index)
            self._blobs.remove(tenant, gone)
            return gone

    # ---- inside

    def _index(self, tenant: str) -> Index:
        """What is known of a tenant's programs now."""
        stamp = self._blobs.stamp(tenant)
        known = self._known.get(tenant)
        if known is None or known[0] != stamp:
            raw = self._blobs.index(tenant)
            known = self._known[tenant] = (stamp, Index() if raw is None else self._decoded(tenant, raw))
        return known[1]

    def _commit(self, tenant: str, index: Index) -> None:
        self._blobs.put_index(tenant, msgspec.json.encode(index))
        self._known[tenant] = (self._blobs.stamp(tenant), index)

    def _open(self, tenant: str) -> None:
        """At the start: what is wrong with a tenant's programs is told, and what interrupted writes have left goes."""
        try:
            with self._blobs.changing(tenant):
                self._blobs.tidy(tenant)
                index = self._index(tenant)
                if tenant not in self._damaged:
                    self._known[tenant] = (self._known[tenant][0], self._tidied(tenant, index))
        except StorageFailed as error:
            logger.warning("programs of tenant %r are not tidied up: %s", tenant, error.message)

    def _decoded(self, tenant: str, raw: bytes) -> Index:
        try:
            return msgspec.json.decode(raw, type=Index)
        except msgspec.MsgspecError as error:
            logger.error("the programs of tenant %r cannot be read and are not served: %s", tenant, error)
            self._damaged.add(tenant)
            return Index()

    def _tidied(self, tenant: str, index: Index) -> Index:
        """An index without what has no content any more; content that it does not name goes."""
        index = index.copy()
        stored = self._blobs.stored(tenant)
        for one in set(index.versions) - stored:
            logger.error("program %s of tenant %r has lost its content and is not served", one[:12], tenant)
            del index.versions[one]
        index.names = {
            name: kept
            for name, hashes in index.names.items()
            if (kept := [one for one in hashes if one in index.versions])
        }
        self._blobs.remove(tenant, stored - set(index.versions))
        return index

    def _check_quota(self, index: Index, size: int) -> None:
        quota = self.quota
        if len(index.versions) >= quota.max_programs:
            raise QuotaExceeded(f"There are {len(index.versions)} versions, as many as are kept; delete some first.")
        used = sum(version.size_bytes for version in index.versions.values())
        if used + size > quota.max_bytes:
            raise QuotaExceeded(
                f"{size} bytes more than the {used} there are exceed {quota.max_bytes}; delete programs first."
            )


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


def _program(index: Index, name: str) -> Program:
    return Program(name, [index.versions[one] for one in index.names[name]])


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
