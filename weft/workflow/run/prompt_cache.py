"""The prompt cache of a run: answers that equal requests to the same model have had before.

Only requests that can be answered in one way have a key: those that ask for greedy sampling, or give a seed. The key
names the tenant, the model with its weights and the precision it computes in, the endpoint, and every field of the
request, its messages too; where the backend has the model's tokenizer, also the token ids of the prompt; where it is a
server of which nothing else is known, the name of the model that the request is for.

Runs that share `CallsInFlight` make equal calls that are due at the same time once, as one run does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial

import msgspec

from weft.abi.errors import StorageFailed
from weft.store.answers import AnswerTable
from weft.threads import FairThreads
from weft.workflow.run.calls import ModelAnswer

_decoder = msgspec.json.Decoder(ModelAnswer)


CallsInFlight = dict[tuple[str, str], asyncio.Future[ModelAnswer | None]]
"""By tenant and key: answers that are awaited, or not yet in the database; None: the call gave none. Of one loop."""


class PromptCache:
    """The answers of one tenant and model in a database."""

    def __init__(
        self,
        table: AnswerTable,
        model: str,
        tenant: str = "",
        in_flight: CallsInFlight | None = None,
        threads: FairThreads | None = None,
    ):
        """`threads` read the table; None: those of the event loop."""
        self._table = table
        self._model = model
        self._tenant = tenant
        self._threads = threads
        self._in_flight = {} if in_flight is None else in_flight

    async def answer(
        self, key: str, make: Callable[[], Awaitable[ModelAnswer]], waits: Callable[[], None]
    ) -> ModelAnswer:
        """The answer of the cache, or of an equal call that is in flight, after `waits` was called; else that of
        `make`, which is kept. Where an equal call fails or is cancelled, the next one that waited for it is made."""
        name = self._tenant, f"{self._model} {key}"
        while (first := self._in_flight.get(name)) is not None:
            waits()
            found = await asyncio.shield(first)
            if found is not None:
                return found.again
        awaited = self._in_flight[name] = asyncio.get_running_loop().create_future()
        answer: ModelAnswer | None = None
        try:
            answer = await self.get(key) or await make()
            return answer
        finally:
            awaited.set_result(answer)
            written = None
            if answer is not None and not answer.is_cached:
                written = self._put(key, answer)
            if written is None:
                del self._in_flight[name]
            else:
                # Until then the database does not give it.
                asyncio.wrap_future(written).add_done_callback(partial(self._written, name))

    async def get(self, key: str) -> ModelAnswer | None:
        """An answer, which costs no tokens; None where there is none, or where it cannot be read: the call is then
        made, and the database has logged why."""
        return await self._found(key, marks_use=True)

    async def peek(self, key: str) -> ModelAnswer | None:
        """As `get`, and nothing changes in the database."""
        return await self._found(key, marks_use=False)

    async def _found(self, key: str, *, marks_use: bool) -> ModelAnswer | None:
        full = f"{self._model} {key}"
        try:
            get = partial(self._table.get, self._tenant, full, marks_use=marks_use)
            if self._threads is None:
                found = await asyncio.to_thread(get)
            else:
                found = await self._threads.run(get, tenant=self._tenant)
        except StorageFailed:
            return None
        if found is None:
            return None
        return _decoder.decode(found).again

    def _put(self, key: str, answer: ModelAnswer) -> Future[None] | None:
        """Write an answer; one that cannot be written is not kept, and the database has logged why. None: it is
        closed."""
        try:
            return self._table.put(self._tenant, f"{self._model} {key}", msgspec.json.encode(answer))
        except StorageFailed:
            return None

    def _written(self, name: tuple[str, str], written: asyncio.Future[None]) -> None:
        del self._in_flight[name]
        if not written.cancelled():
            written.exception()  # asyncio need not log it
