"""The prompt cache: answers of models that an equal request has again, by tenant and key.

Owns how much of them is kept: the least recently used ones of a tenant go when they exceed its bytes. Answers are
opaque; keys name all that an answer depends on.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from sqlalchemy import Connection, bindparam, delete, func, select, update

from weft.store.database import Database
from weft.store.schema import model_answers
from weft.store.sqlite import upsert

DEFAULT_BYTES = 1 << 30
ROOM_LEFT = 0.1
"""Part of the bytes that is free after answers have gone: to find them costs as much for many as for one."""
_row = model_answers.c
_OF = _row.tenant == bindparam("of_tenant")
_GET = select(_row.answer).where(_OF, _row.key == bindparam("of_key"))
_USE = update(model_answers).where(_OF, _row.key == bindparam("of_key")).values(used=bindparam("now"))
_PUT = upsert(model_answers)
_LAST = select(func.max(_row.used)).where(_OF)
_SUM = select(func.sum(_row.size_bytes)).where(_OF)
_OLDEST = select(_row.key, _row.size_bytes).where(_OF, _row.used < bindparam("newest")).order_by(_row.used, _row.key)
_DELETE = delete(model_answers).where(_OF, _row.key == bindparam("of_key"))


class AnswerTable:
    """The prompt cache of a database. Used from any thread. Every method raises `StorageFailed`."""

    def __init__(self, database: Database, max_bytes: int = DEFAULT_BYTES):
        """`max_bytes` bounds keys and answers of each tenant."""
        self._database = database
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        """Bytes by tenant, as far as they have been counted."""
        self._lock = threading.Lock()

    def get(self, tenant: str, key: str, *, marks_use: bool = True) -> bytes | None:
        """An answer; it is now the last used one, if that is to be marked. Blocks."""
        found: bytes | None = self._database.read(
            lambda connection: connection.execute(_GET, {"of_tenant": tenant, "of_key": key}).scalar()
        )
        if found is not None and marks_use:

            def work(connection: Connection) -> None:
                now = 1 + (connection.execute(_LAST, {"of_tenant": tenant}).scalar() or 0)
                connection.execute(_USE, {"of_tenant": tenant, "of_key": key, "now": now})

            self._database.write(work, tenant)
        return found

    def put(self, tenant: str, key: str, answer: bytes) -> Future[None]:
        """Keep an answer, and let older ones go where there is no room. One that is larger than all the room is not
        kept. The future is done after the commit."""
        size = len(key) + len(answer)

        def work(connection: Connection) -> None:
            if size > self._max_bytes:
                return
            used = 1 + (connection.execute(_LAST, {"of_tenant": tenant}).scalar() or 0)
            row = {"tenant": tenant, "key": key, "used": used, "size_bytes": size, "answer": answer}
            connection.execute(_PUT, row)
            with self._lock:
                total = self._sizes.get(tenant, 0) + size
                if tenant not in self._sizes or total > self._max_bytes:
                    # Other processes write too, and answers are replaced: the exact sum only where it matters.
                    total = self._make_room(connection, tenant, used)
                self._sizes[tenant] = total

        return self._database.write(work, tenant)

    def _make_room(self, connection: Connection, tenant: str, newest: int) -> int:
        """Let the oldest answers go where all exceed the bytes, but not the newest. Returns the bytes that are left."""
        this = {"of_tenant": tenant}
        total = int(connection.execute(_SUM, this).scalar() or 0)
        if total <= self._max_bytes:
            return total
        going = []
        with connection.execute(_OLDEST, {**this, "newest": newest}) as oldest:
            for key, size in oldest:
                if total <= (1 - ROOM_LEFT) * self._max_bytes:
                    break
                going.append({**this, "of_key": key})
                total -= size
        connection.execute(_DELETE, going)
        return total
