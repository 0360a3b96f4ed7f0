"""`ProgramModel`: one model as programs use it, apart from its sequences.

Owns the objects that all programs of the model share: the description, the packed vocabulary, the compiled grammars.
The program host creates it; the contexts of runs use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from weft.core.grammar import Grammar
from weft.core.wire import EngineInfo
from weft.programs.runtime import Runtime
from weft.threads import Charge, FairThreads
from weft.tokenizers.tokenizer import Tokenizer, off_loop

if TYPE_CHECKING:
    from weft.engine.grammar import Grammars
    from weft.engine.guide import Guide

T = TypeVar("T")

TRAITS = (
    "Core",
    "Messaging",
    "Store",
    "Tokenize",
    "Sequence",
    "Grammar",
)
"""The traits of every model."""
EXPLICIT_TRAITS = ("Allocate", "Forward", "InputText", "OutputText")
"""The traits of models whose KV pages a program may allocate. No model has the traits `InputImage` and `Adapter`."""


class ProgramModel:
    """One model, on one engine."""

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ):
        """`tool_call_parser` and `reasoning_parser` name the forms of the model's tool calls and reasoning."""
        self.name = name
        self.runtime = runtime
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser
        self._vocabulary: asyncio.Future[tuple[bytes, bytes]] | None = None
        self._grammars: Grammars | None = None
        self._follow: FairThreads | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.runtime.tokenizer

    @property
    def info(self) -> EngineInfo:
        """The engine's description. Raises `EngineDead` until the engine was ready for the first time."""
        return self.runtime.engine.info

    def describe(self) -> dict[str, Any]:
        """The description in the answer to `Op.MODELS`. Raises `EngineDead` like `info`."""
        info = self.info
        return {
            "name": self.name,
            "traits": [*TRAITS, *(EXPLICIT_TRAITS if info.explicit_pages else ())],
            "vocab_size": info.vocab_size,
            "page_size": info.page_size,
            "max_context": info.max_context,
            "eos_token_ids": info.eos_token_ids,
            "hidden_size": info.hidden_size,
            "dtype": info.dtype,
            "device": info.device,
            "chat_template": self.tokenizer.has_chat_template,
            "tool_call_parser": self._tool_call_parser,
            "reasoning_parser": self._reasoning_parser,
            "reasoning": self._reasoning_parser is not None,
        }

    def token_bytes(self) -> list[bytes]:
        """The bytes of every row of the model's vocabulary; empty for rows without a token."""
        known = list(self.tokenizer.token_bytes)
        return known + [b""] * (self.info.vocab_size - len(known))

    async def vocabulary(self) -> tuple[bytes, bytes]:
        """The packed vocabulary: uint32 length of each token's bytes; all bytes. Computed once, on a thread."""
        if self._vocabulary is None:
            tokens = self.token_bytes()
            self._vocabulary = asyncio.ensure_future(off_loop(partial(_pack_vocabulary, tokens)))
        # The first caller may be cancelled while others wait for the same result.
        return await asyncio.shield(self._vocabulary)

    async def guide(self, grammar: Grammar, tenant: str, charge: Charge) -> Guide:
        """A guide in the initial state of a grammar, compiled on a thread. Raises `InvalidRequest` with the error of an
        invalid grammar."""
        from weft.engine.guide import Guide

        loop = asyncio.get_running_loop()

        def charge_later(seconds: float) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(charge, seconds)

        grammars = self._open_grammars()
        try:
            # Other runs of the tenant may wait for the same grammar when the caller is cancelled.
            compiled = await asyncio.shield(asyncio.wrap_future(grammars.hold(grammar, tenant, charge_later)))
        finally:
            grammars.let_go(grammar, tenant)
        return await self.follow(lambda: Guide(compiled.deep_copy()), tenant, charge)

    async def follow(self, work: Callable[[], T], tenant: str, charge: Charge) -> T:
        """Run a step of a grammar on a thread; the steps of a tenant run in the order of the calls."""
        return await self._open_threads().run(work, tenant=tenant, charge=charge)

    def close(self) -> None:
        """Stop the threads of the model. Idempotent."""
        if self._vocabulary is not None:
            self._vocabulary.cancel()
        if self._grammars is not None:
            self._grammars.close()
        if self._follow is not None:
            self._follow.close()

    def _open_threads(self) -> FairThreads:
        if self._follow is None:
            self._follow = FairThreads(2, per_tenant=1, name="weft-follow")
        return self._follow

    def _open_grammars(self) -> Grammars:
        if self._grammars is None:
            from weft.engine.grammar import Grammars  # loads a library and starts threads; few programs need it

            tokenizer = self.tokenizer
            eos = sorted({*self.info.eos_token_ids, *tokenizer.eos_token_ids})
            encode = partial(tokenizer.encode, add_special_tokens=False)
            self._grammars = Grammars(self.token_bytes(), tokenizer.special_ids, eos, encode)
        return self._grammars


def _pack_vocabulary(tokens: list[bytes]) -> tuple[bytes, bytes]:
    lengths = np.fromiter(map(len, tokens), np.uint32, len(tokens))
    return lengths.tobytes(), b"".join(tokens)
