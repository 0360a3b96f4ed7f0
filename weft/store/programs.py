"""Rows of uploaded programs: each tenant's versions and names. The content of a version is a blob.

`weft.programs.registry.Registry` calls it, and decides what may be uploaded. Every method blocks and may raise
`StorageFailed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, select

from weft.abi.errors import StorageFailed
from weft.store.database import Database
from weft.store.schema import program_names, program_versions
from weft.store.sqlite import upsert

_NamedRow = Row[str, str, str, int, float]
ProgramKind = Literal["python", "wasm"]
_versions, _names = program_versions.c, program_names.c
_NAMED = (
    select(_names.name, _versions.hash, _versions.kind, _versions.size_bytes, _versions.created_s)
    .join_from(program_names, program_versions, and_(_names.tenant == _versions.tenant, _names.hash == _versions.hash))
    .order_by(_names.name, _names.position)
)


class ProgramVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a program, without its content."""

    hash: str
    """SHA-256 of its content, in hexadecimal."""
    kind: ProgramKind
    size_bytes: int
    created_s: float
    """When it was first uploaded, in seconds since 1970."""


class ProgramTable:
    """Names and versions of a database's programs."""

    def __init__(self, database: Database):
        self._database = database

    def names(self, tenant: str) -> dict[str, list[ProgramVersion]]:
        """The versions of every name, oldest first; names in alphabetical order."""
        found: dict[str, list[ProgramVersion]] = {}
        for row in self._select(_names.tenant == tenant):
            found.setdefault(row.name, []).append(_version(row))
        return found

    def versions(self, tenant: str, name: str) -> list[ProgramVersion]:
        """The versions of a name, oldest first; empty where there is no such name."""
        return [_version(row) for row in self._select(and_(_names.tenant == tenant, _names.name == name))]

    def beginning(self, tenant: str, short: str) -> dict[str, str]:
        """Hashes with this prefix, and the alphabetically first name of each."""
        found: dict[str, str] = {}
        # Hashes are of 0-9 and a-f; "g" follows all of them.
        for row in self._select(and_(_names.tenant == tenant, _names.hash >= short, _names.hash < short + "g")):
            found.setdefault(row.hash, row.name)
        return found

    def add(
        self, tenant: str, name: str, version: ProgramVersion, content: bytes, check: Callable[[int, int], None]
    ) -> list[ProgramVersion]:
        """Make a version the latest of a name; all versions of the name. For a new version `check` is called with the
        number and the total bytes of the tenant's versions, and may raise."""

        def work(connection: Connection, blob: str) -> tuple[list[ProgramVersion], list[str]]:
            mine = and_(_versions.tenant == tenant, _versions.hash == version.hash)
            known = connection.execute(select(program_versions).where(mine)).first()
            if known is None:
                count = select(func.count(), func.coalesce(func.sum(_versions.size_bytes), 0))
                check(*connection.execute(count.where(_versions.tenant == tenant)).one())
            # A repeated upload replaces the blob, which may have been damaged.
            row = msgspec.structs.asdict(version) | {"tenant": tenant, "blob": blob}
            connection.execute(
                upsert(program_versions), row | ({} if known is None else {"created_s": known.created_s})
            )
            named = and_(_names.tenant == tenant, _names.name == name)
            connection.execute(delete(program_names).where(named, _names.hash == version.hash))
            last = connection.execute(select(func.coalesce(func.max(_names.position), -1)).where(named)).scalar_one()
            place = {"tenant": tenant, "name": name, "hash": version.hash, "position": last + 1}
            connection.execute(insert(program_names), place)
            kept = [_version(one) for one in connection.execute(_NAMED.where(named))]
            return kept, [] if known is None else [known.blob]

        return self._database.write_blob(content, work, tenant)

    def remove(self, tenant: str, name: str | None, hash: str | None) -> list[str] | None:
        """Remove a version (None: all) from a name (None: from all). The hashes of versions that lost their last name
        and are deleted; None where nothing matched."""

        def work(connection: Connection) -> list[tuple[str, str]] | None:
            chosen = delete(program_names).where(_names.tenant == tenant)
            chosen = chosen if name is None else chosen.where(_names.name == name)
            chosen = chosen if hash is None else chosen.where(_names.hash == hash)
            if not connection.execute(chosen).rowcount:
                return None
            named = select(_names.hash).where(_names.tenant == tenant)
            unnamed = and_(_versions.tenant == tenant, _versions.hash.not_in(named))
            gone = connection.execute(select(_versions.hash, _versions.blob).where(unnamed).order_by(_versions.hash))
            rows = [(row.hash, row.blob) for row in gone]
            connection.execute(delete(program_versions).where(unnamed))
            return rows

        gone = self._database.write(work, tenant).result()
        if gone is None:
            return None
        self._database.remove_blobs(blob for _, blob in gone)
        return [hash for hash, _ in gone]

    def content(self, tenant: str, hash: str) -> bytes | None:
        """Content of a version; None for an unknown one. Raises `StorageFailed` also where the content is lost or does
        not match its hash."""
        query = select(_versions.blob).where(_versions.tenant == tenant, _versions.hash == hash)
        try:
            content = self._database.read_blob(lambda connection: connection.execute(query).scalar_one_or_none())
        except FileNotFoundError:
            raise StorageFailed(f"the program {hash[:12]} has lost its content; upload it again") from None
        if content is not None and hashlib.sha256(content).hexdigest() != hash:
            raise StorageFailed(f"the program {hash[:12]} is damaged on disk; upload it again")
        return content

    def _select(self, condition: ColumnElement[bool]) -> list[_NamedRow]:
        if not self._database.exists():
            return []
        return self._database.read(lambda connection: list(connection.execute(_NAMED.where(condition))))


def _version(row: _NamedRow) -> ProgramVersion:
    return ProgramVersion(hash=row.hash, kind=row.kind, size_bytes=row.size_bytes, created_s=row.created_s)
