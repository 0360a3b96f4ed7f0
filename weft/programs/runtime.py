"""What a trusted program holds: sequences and spaces on an engine, and operations on them, from asyncio.

`Runtime` opens both; `weft.programs.sequence` and `weft.programs.space` say what can be done with them. Built-in
programs and the offline API call it. It does not know text, HTTP, or how an engine works. Used from one event loop.

A sequence is a resource: `async with rt.open(caller) as seq` gives it back however the block ends. Nothing here needs
an `await` to release, so it also works while a task is being cancelled.
"""

from __future__ import annotations

from weft.abi.errors import EngineDead
from weft.engine.client import EngineClient
from weft.programs.engine_link import EngineLink, OnEvent
from weft.programs.lasting import LastingSequence, Revival, WaitingBytes
from weft.programs.recovery import Recovery
from weft.programs.retains import PrefixRetains
from weft.programs.sequence import SequenceHandle
from weft.programs.space import SpaceHandle
from weft.programs.types import Caller
from weft.tokenizers.tokenizer import Tokenizer


class Runtime(EngineLink):
    """Opens sequences and spaces on one engine."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        *,
        on_event: OnEvent | None = None,
        engine_wait_s: float = 0.0,
    ):
        """`engine_wait_s`: how long built-in programs, and operations on lasting sequences, wait for the restart of a
        dead engine; 0: they fail with it."""
        super().__init__(engine, on_event)
        self.recovery = Recovery(engine, engine_wait_s)
        self._revival = Revival(self, engine_wait_s)
        self.tokenizer = tokenizer
        self.retains = PrefixRetains(self)
        """Prefixes that the engine keeps on request."""

    @property
    def num_sequences(self) -> int:
        """Sequences that programs hold now."""
        return sum(isinstance(handle, SequenceHandle) for handle in self._handles.values())

    def open(self, caller: Caller) -> SequenceHandle:
        """A new, empty sequence. Raises `EngineDead` where the engine is known to be down."""
        self.check_ready()
        return SequenceHandle.opened(self, caller)

    def open_lasting(self, caller: Caller, waiting: WaitingBytes | None = None) -> LastingSequence:
        """A new, empty sequence that outlives the engine. `waiting` counts what waits on it and others. Raises
        `EngineDead` before the engine's first start."""
        try:
            _ = self.engine.info
        except EngineDead:
            self.check_ready()
            raise
        sequence = LastingSequence(self, self.number(), caller, self._revival, waiting or WaitingBytes())
        if self.engine.ready:
            sequence.revive()
        return sequence

    def open_space(self, caller: Caller, reserve_pages: int = 0, tenant_pages: int | None = None) -> SpaceHandle:
        """A new, empty space of explicit pages, `reserve_pages` of which are its own at once; all spaces and exports of
        its tenant hold at most `tenant_pages`. Raises `EngineDead` where the engine is known to be down."""
        self.check_ready()
        return SpaceHandle(self, caller, reserve_pages, tenant_pages)
