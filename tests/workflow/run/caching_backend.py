"""A server in memory with a prefix cache of bounded size, which counts what it computes."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.testing.word_tokens import WordTokens
from weft.workflow.actuals import CallUsage
from weft.workflow.graph.values import PartRanges
from weft.workflow.run.calls import ModelAnswer, ModelRequest

PAGE = 4


class CachingBackend:
    """Answers one call after the other, in the order in which they came, with `output_tokens` words that follow from
    the request. A prompt's pages are found where an earlier prompt or answer of the same beginning left them; the ones
    used longest ago are let go, ends before beginnings."""

    def __init__(self, kv_tokens: int, output_tokens: int = 20):
        self.tokens = WordTokens()
        self.sent: list[str] = []
        """The last message of each call, in the order in which they came."""
        self.prefill_tokens = 0
        self._room = kv_tokens // PAGE
        self._output_tokens = output_tokens
        self._pages: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._serving = asyncio.Lock()
        self.pins: Counter[tuple[int, ...]] = Counter()
        """How many times a page is kept, by the tokens up to its end."""

    def forget(self) -> None:
        """Let go of everything, what is kept too."""
        self._pages.clear()

    async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
        messages: Sequence[Mapping[str, Any]] = request.body["messages"]
        self.sent.append(messages[-1]["content"])
        async with self._serving:
            # A turn of the loop for each call: others can come while one is served.
            await asyncio.sleep(0)
            started()
            said = hashlib.sha256(repr(messages).encode()).hexdigest()[:12]
            text = " ".join(f"{said}{number}" for number in range(self._output_tokens))
            prompt = tuple(self.tokens.encode(self.tokens.chat(messages, {})))
            found = self._use(prompt, tuple(self.tokens.encode(text)))
            self.prefill_tokens += len(prompt) - found
            return ModelAnswer(text, "stop", (), CallUsage(len(prompt), found, self._output_tokens))

    async def split(self, text: str, ranges: PartRanges) -> list[str]:
        raise NotImplementedError

    def _use(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> int:
        """Note a sequence; returns how many tokens of the prompt were there."""
        whole = prompt + answer
        pages = [whole[:end] for end in range(PAGE, len(whole) + 1, PAGE)]
        found = next((at for at, page in enumerate(pages) if page not in self._pages), len(pages))
        for page in reversed(pages):
            self._pages[page] = None
            self._pages.move_to_end(page)
        for page in [page for page in self._pages if not self.pins[page]]:
            if len(self._pages) <= self._room:
                break
            del self._pages[page]
        return min(found * PAGE, len(prompt) - 1)
