"""The Store trait: small values by name, of the program's tenant. `weft.programs.run.context` calls it."""

from __future__ import annotations

import msgspec

from weft.programs.run.calls.call_kinds import answer_by_task
from weft.programs.run.calls.view import RunView, text_of
from weft.store.values import check_name


class StoreCalls:
    """Of one run. Each call is carried out on the store's thread, in the order in which they were asked for."""

    def __init__(self, view: RunView):
        self._calls = view.calls
        self._store = view.services.store
        self._tenant = view.caller.tenant

    def put(self, call: int, name: bytes, value: bytes) -> None:
        """Store a value under a name, in place of the old one."""
        answer_by_task(self._calls, call, self._put(check_name(text_of(name, "name")), value), held=len(value))

    def get(self, call: int, name: bytes) -> None:
        """The value of a name."""
        answer_by_task(self._calls, call, self._get(check_name(text_of(name, "name"))))

    def delete(self, call: int, name: bytes) -> None:
        """Delete a name of the tenant's store."""
        answer_by_task(self._calls, call, self._delete(check_name(text_of(name, "name"))))

    def names(self, call: int, prefix: bytes) -> None:
        """The stored names that begin with a prefix, as JSON."""
        answer_by_task(self._calls, call, self._names(text_of(prefix, "prefix")))

    async def _put(self, name: str, value: bytes) -> tuple[bytes, ...]:
        await self._store.put(self._tenant, name, value)
        return ()

    async def _get(self, name: str) -> tuple[bytes, ...]:
        value = await self._store.get(self._tenant, name)
        return (b"\0", b"") if value is None else (b"\1", value)

    async def _delete(self, name: str) -> tuple[bytes, ...]:
        await self._store.delete(self._tenant, name)
        return ()

    async def _names(self, prefix: str) -> tuple[bytes, ...]:
        return (msgspec.json.encode(await self._store.names(self._tenant, prefix)),)
