"""What is under a `Context`: the tokens of one sequence, and how texts, messages and generations become tokens on it.

Owns the promise that `tokens` are those of the sequence, and that the chat's text is theirs. What is put in is taken at
once and waits; `flush` renders, tokenizes and appends it. `weft.sdk.context` is its face.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items
from typing import Any

from weft.abi.errors import EngineDead, InvalidRequest
from weft.sdk.channel import current
from weft.sdk.chat import Chat, common_prefix
from weft.sdk.generation import Generation, thinks
from weft.sdk.model import own_model
from weft.sdk.sequence import Generating, Part, Sequence, Usage
from weft.sdk.tokens import detokenize, tokenize

Ranges = tuple[tuple[int, int], ...]
Masks = list[tuple[int, Ranges]]


class TokenBuffer:
    """One sequence with its tokens and its chat. `parent`: what it becomes a fork of, once that calls `branch`."""

    def __init__(self, chat: Chat, priority: int = 0, *, parent: TokenBuffer | None = None):
        self.channel = current()
        self.priority = priority
        self.parent = parent
        """Until the fork is made, which has to wait for what the parent was given before."""
        if parent is None:
            self.sequence = Sequence(priority, channel=self.channel)
        else:
            self.sequence = Sequence.reserved(self.channel)
        self.tokens: list[int] = []
        """All on the sequence."""
        self.masks: Masks = []
        """(how many tokens there were, what is hidden from those that followed), in order."""
        self.base = 0
        """Tokens before the chat."""
        self.chat = chat
        self.pending: list[str | list[int] | dict[str, Any] | TokenBuffer] = []
        """Put in, and not on the sequence yet: texts, tokens, messages, and forks that come after them."""
        self.is_dirty = False
        """Whether the chat has messages that are not on the sequence."""
        self.usage = Usage()
        """Of all generations together."""
        self._lock = asyncio.Lock()
        self.last: Generation | None = None
        """The generation that began last."""

    def put(self, item: str | list[int] | dict[str, Any]) -> None:
        """Take something in, for the next flush."""
        self.sequence.check()
        if item:
            self.pending.append(item)

    async def flush(self, *, cue: bool = False) -> None:
        """Put what was added on the sequence, so that it can be computed while the program does something else.

        `cue`: with the beginning of the assistant's turn. Ends a generation that is under way.
        """
        # Two tasks may fork one context at once: what is pending goes on the sequence once.
        async with self._lock:
            await self._flush(cue)

    async def _flush(self, cue: bool) -> None:
        await self.settle()
        while self.pending:
            item = self.pending[0]
            if isinstance(item, dict):
                self.chat.add(item)
                self.is_dirty = True
            elif isinstance(item, TokenBuffer):
                if self.is_dirty:
                    await self._render(False)
                self._branch(item)
            else:
                await self._fill(item)
            del self.pending[0]
        if self.chat.messages and (self.is_dirty or (cue and self.chat.turn is None)):
            await self._render(cue)

    def branch(self, child: TokenBuffer) -> None:
        """Make a child a fork as of now: at once, or after what was put in before."""
        is_busy = self.last is not None and not self.last.ended
        if self.parent is not None or self.pending or self.is_dirty or is_busy:
            self.pending.append(child)
        else:
            self._branch(child)

    def give_back(self) -> None:
        """Give the sequence back. Does nothing the second time."""
        if self.parent is None:
            self.sequence.release()
        else:
            self.sequence.close()

    async def settle(self) -> None:
        """Be a fork, if it is to be one; end a generation that is under way: the context is what was read of it."""
        if self.parent is not None:
            await self.parent.flush()
        last = self.last
        if last is None or last.ended:
            return
        if last.is_reading:
            raise InvalidRequest("another task reads a generation of this context; fork the context for each task")
        await last.cancel()

    def edit(self, keep: int, add: list[int]) -> None:
        """Keep the first tokens, then add others."""
        if keep < len(self.tokens):
            self.sequence.truncate(keep)
            del self.tokens[keep:]
            self.masks = [mask for mask in self.masks if mask[0] <= keep]
        if add:
            self.sequence.append(add)
            self.tokens += add

    def hide(self, ranges: Ranges) -> None:
        """Hide tokens from those that follow."""
        self.sequence.mask(*ranges)
        self.masks = [*(mask for mask in self.masks if mask[0] < len(self.tokens)), (len(self.tokens), ranges)]

    def become(self, tokens: Items[int], masks: Masks) -> None:
        """Have exactly these tokens, computed under these masks. What is the same already stays."""
        keep = common_prefix(self.tokens, list(tokens))
        different = [mask[0] for mask in [*self.masks, *masks] if mask not in self.masks or mask not in masks]
        keep = min([keep, *different])
        self.edit(keep, [])
        for start, ranges in masks:
            if start >= keep:
                self.edit(len(self.tokens), list(tokens[len(self.tokens) : start]))
                self.hide(ranges)
        if self.masks and self.masks[-1][0] == keep and self.masks[-1] not in masks:
            # What was hidden from here on is seen again, or as before.
            self.hide(self.masks[-2][1] if len(self.masks) > 1 else ())
        self.edit(len(self.tokens), list(tokens[len(self.tokens) :]))

    # ---- as the host of its generations

    async def begin(self, generation: Generation) -> Generating:
        """Put a generation on the sequence."""
        await self.flush(cue=True)
        if not self.tokens:
            raise InvalidRequest("the context is empty; fill it, or add a message, before it generates", "prompt")
        if self.chat.messages:
            generation.prompt_thinks = thinks(self.chat.text)
        self.last = generation
        return self.sequence.generate(
            generation.sampler,
            generation.stopping,
            generation.grammar,
            special=generation.special,
            whole=generation.is_whole,
        )

    def grow(self, part: Part) -> None:
        """The sequence has these tokens more."""
        self.tokens += part.tokens

    async def end(self, generation: Generation, *, is_whole: bool) -> None:
        """A generation has ended: what ended it goes, or ends the turn."""
        self.usage += generation.usage
        if not is_whole:
            self._end_early(generation)
            return
        by_token = generation.reason == "stop" and not isinstance(generation.stop, str)
        if not self.chat.messages:
            if by_token:
                self.edit(len(self.tokens) - 1, [])
            elif isinstance(generation.stop, str):
                await self._cut(generation)
            return
        ending = ""
        if by_token:
            ending = await detokenize(generation.tokens[-1:], skip_special=False)
        elif isinstance(generation.stop, str):
            await self._cut(generation)
        self.chat.said(generation.text, ending)
        if by_token:
            self._end_turn(generation, thinking=(await own_model()).reasoning)

    # ---- inside

    def _branch(self, child: TokenBuffer) -> None:
        child.parent = None
        if child.sequence.is_open:
            self.sequence.fork(child.sequence)
        child.tokens, child.base, child.last = list(self.tokens), self.base, self.last
        child.masks = list(self.masks)
        child.chat = self.chat.copy()

    async def _fill(self, item: str | list[int]) -> None:
        """Text or tokens; in a chat, of the assistant's turn."""
        if self.chat.messages and self.chat.turn is None:
            await self._render(True)
        if isinstance(item, str):
            self.edit(len(self.tokens), await tokenize(item, special=not self.tokens))
            text = item
        else:
            self.edit(len(self.tokens), item)
            text = await detokenize(item, skip_special=False) if self.chat.messages else ""
        if self.chat.messages:
            self.chat.said(text)
        else:
            self.base = len(self.tokens)

    async def _render(self, cue: bool) -> None:
        edit = await self.chat.edit(self.tokens[self.base :], cue=cue)
        self.edit(self.base + edit.keep, edit.add)
        self.is_dirty = False

    def _end_turn(self, generation: Generation, *, thinking: bool) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": self.chat.turn}
        if thinking and self.chat.turn == generation.text:
            message["content"] = generation.answer
            if generation.reasoning:
                message["reasoning_content"] = generation.reasoning
        self.chat.end_turn(message)

    def _end_early(self, generation: Generation) -> None:
        """Tokens that were not read are forgotten. Of the text, a part may have been held back, so it is unknown."""
        if generation.reason != EngineDead.kind and self.sequence.is_open:
            self.sequence.truncate(len(self.tokens))
        if self.chat.messages:
            self.chat.said(generation.text)
            self.chat.text = None
        else:
            self.base = len(self.tokens)

    async def _cut(self, generation: Generation) -> None:
        """Keep the tokens of the text only, without those of the stop string."""
        tokens, start = generation.tokens, len(self.tokens) - len(generation.tokens)
        skip = not generation.special
        num = len(tokens)
        known = ""
        # From the end on: a stop string covers few tokens.
        while num:
            num -= 1
            known = await detokenize(tokens[:num], skip_special=skip) if num else ""
            if generation.text.startswith(known):
                break
        rest = generation.text[len(known) :]
        self.edit(start + num, await tokenize(rest) if rest else [])
        if not self.chat.messages:
            self.base = len(self.tokens)
