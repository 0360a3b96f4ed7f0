"""The prompt cache of a run: answers that equal requests to the same model have had before.

Only requests that can be answered in one way have a key: those that ask for greedy sampling, or give a seed. The key
names the tenant, the model with its weights and the precision it computes in, the endpoint, and every field of the
request, its messages too; where the backend has the model's tokenizer, also the token ids of the prompt; where it is a
server of which nothing else is known, the name of the model that the request is for.
"""

from __future__ import annotations

import asyncio

import msgspec

from weft.abi.errors import StorageFailed
from weft.store.answers import AnswerTable
from weft.workflow.run.calls import ModelAnswer

_decoder = msgspec.json.Decoder(ModelAnswer)


class PromptCache:
    """The answers of one tenant and model in a database."""

    def __init__(self, table: AnswerTable, model: str, tenant: str = ""):
        self._table = table
        self._model = model
        self._tenant = tenant

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
            found = await asyncio.to_thread(self._table.get, self._tenant, full, marks_use=marks_use)
        except StorageFailed:
            return None
        if found is None:
            return None
        return _decoder.decode(found).again

    def put(self, key: str, answer: ModelAnswer) -> None:
        """Keep an answer. It is written some time later; one that cannot be written is not kept."""
        self._table.put(self._tenant, f"{self._model} {key}", msgspec.json.encode(answer))
