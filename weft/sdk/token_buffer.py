"""The token side of a `Context`: texts, messages and generations become tokens of one sequence.

Invariant: `tokens` are exactly those of the sequence, and `chat.text`, where it is known, is the text of the chat's
tokens. The host may refuse an append, for example because of a limit of pages; then the tokens since the last that came
from the sequence are put on it again before its next operation.

Input is queued at once; `flush` renders, tokenizes and appends it. `weft.sdk.context` is the public interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from typing import Any

from weft.abi.errors import InvalidRequest, UnknownHandle, WeftError
from weft.sdk.channel import current
from weft.sdk.chat import Chat, common_prefix
from weft.sdk.generation import Generation
from weft.sdk.model import own_model
from weft.sdk.sequence import Generating, Part, Sequence, Usage
from weft.sdk.tokens import detokenize, tokenize
from weft.text.reasoning import is_open

Ranges = tuple[tuple[int, int], ...]
Masks = list[tuple[int, Ranges]]


class TokenBuffer:
    """One sequence with its tokens and its chat. `parent`: the buffer of which this one becomes a fork when the parent
    calls `branch`."""

    def __init__(self, chat: Chat, priority: int = 0, *, parent: TokenBuffer | None = None):
        self.channel = current()
        self.priority = priority
        self.parent = parent
        """Set until the fork is made, which waits for the earlier input of the parent."""
        if parent is None:
            self.sequence = Sequence(priority, channel=self.channel)
        else:
            self.sequence = Sequence.reserved(self.channel)
        self.tokens: list[int] = []
        """All tokens of the sequence."""
        self._num_confirmed = 0
        """The first so many are on the sequence; later ones if none of its commands has failed."""
        self._num_failures = 0
        """Failures of the sequence's commands that were taken account of."""
        self.masks: Masks = []
        """(number of tokens at that point, ranges hidden from the tokens after it), in order."""
        self.base = 0
        """Number of tokens before the chat."""
        self.chat = chat
        self.pending: list[str | list[int] | dict[str, Any] | TokenBuffer] = []
        """Queued input that is not on the sequence yet: texts, tokens, messages, and forks to make after them."""
        self.is_dirty = False
        """Whether the chat has messages whose tokens are not on the sequence."""
        self.usage = Usage()
        """Sum over all generations of the context."""
        self._lock = asyncio.Lock()
        self._release: Callable[[], None] | None = None
        """Ends the sequence of a context that was given up; called when no fork is to be made of it any more."""
        self.last: Generation | None = None
        """The latest generation, if any."""

    def check(self) -> None:
        """Raise `UnknownHandle` if the context was given up, or the error of an earlier command on its sequence."""
        if self._release is not None:
            raise UnknownHandle(f"the context of sequence {self.sequence.number} was released; open another one")
        self.sequence.check()

    def put(self, item: str | list[int] | dict[str, Any]) -> None:
        """Queue input for the next flush."""
        self.check()
        if item:
            self.pending.append(item)

    async def flush(self, *, add_generation_prompt: bool = False) -> None:
        """Append the queued input to the sequence, so that the engine computes it while the program does other work.

        `add_generation_prompt`: also append the beginning of the assistant's turn. Stops a generation in progress.
        """
        # Two tasks may fork one context concurrently; pending input must be appended once.
        async with self._lock:
            await self._flush(add_generation_prompt)

    async def _flush(self, add_generation_prompt: bool) -> None:
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
            if self._release is not None and isinstance(item, TokenBuffer):
                self._release_if_unneeded()
                if not self.sequence.is_open:
                    return
        if self.chat.messages and (self.is_dirty or (add_generation_prompt and self.chat.turn is None)):
            await self._render(add_generation_prompt)

    def branch(self, child: TokenBuffer) -> None:
        """Make a child a fork of the present state: at once, or after the input queued so far."""
        is_busy = self.last is not None and not self.last.ended
        if self.parent is not None or self.pending or self.is_dirty or is_busy:
            self.pending.append(child)
        else:
            self._branch(child)

    def drop(self) -> None:
        """Release the context, and its sequence as soon as all its forks are made. Idempotent."""
        self._give_up_by(self.sequence.release)

    def hold(self, seconds: float) -> None:
        """Release the context, but keep its KV for `seconds` for a context that begins with the same tokens."""
        self.check()
        sequence = self.sequence

        def end() -> None:
            # A sequence that failed since has no KV to keep.
            with suppress(WeftError):
                sequence.hold(seconds)
            sequence.release()

        self._give_up_by(end)

    def replace_sequence(self, sequence: Sequence) -> None:
        """Go on with another sequence, and release the present one."""
        self.sequence.release()
        self.sequence, self._release = sequence, None
        self._num_confirmed, self._num_failures = 0, sequence.num_failures

    async def complete_fork(self) -> None:
        """Make the context a fork of its parent, if that is still to be done."""
        parent = self.parent
        if parent is not None:
            async with parent._lock:
                # Another fork of the parent may have made all of them meanwhile.
                if self.parent is not None:
                    await parent._flush(False)

    async def settle(self) -> None:
        """Complete a pending fork, and stop a generation in progress; the tokens read so far stay."""
        await self.complete_fork()
        last = self.last
        if last is None or last.ended:
            return
        if last.is_reading:
            raise InvalidRequest("another task reads a generation of this context; fork the context for each task")
        await last.cancel()

    def edit(self, keep: int, add: list[int]) -> None:
        """Keep the first `keep` tokens, then append `add`."""
        self._repair()
        if keep < len(self.tokens):
            self._truncate(keep)
        if add:
            self.sequence.append(add)
            self.tokens += add

    def hide(self, ranges: Ranges) -> None:
        """Hide ranges from the tokens that follow."""
        self._repair()
        self.sequence.mask(*ranges)
        self.masks = [*(mask for mask in self.masks if mask[0] < len(self.tokens)), (len(self.tokens), ranges)]

    def become(self, tokens: Items[int], masks: Masks) -> None:
        """Make the sequence exactly these tokens under these masks. A common prefix stays."""
        keep = common_prefix(self.tokens, list(tokens))
        different = [mask[0] for mask in [*self.masks, *masks] if mask not in self.masks or mask not in masks]
        keep = min([keep, *different])
        self.edit(keep, [])
        for start, ranges in masks:
            if start >= keep:
                self.edit(len(self.tokens), list(tokens[len(self.tokens) : start]))
                self.hide(ranges)
        if self.masks and self.masks[-1][0] == keep and self.masks[-1] not in masks:
            # Restore the mask that held before this point.
            self.hide(self.masks[-2][1] if len(self.masks) > 1 else ())
        self.edit(len(self.tokens), list(tokens[len(self.tokens) :]))

    # The protocol `GenerationHost`

    async def begin(self, generation: Generation) -> Generating:
        """Start a generation on the sequence."""
        await self.flush(add_generation_prompt=True)
        if not self.tokens:
            raise InvalidRequest("the context is empty; fill it, or add a message, before it generates", "prompt")
        if self.chat.messages:
            generation.prompt_thinks = is_open(self.chat.text or "")
        self.last = generation
        self._repair()
        return self.sequence.generate(
            generation.sampler,
            generation.stopping,
            generation.grammar,
            special=generation.special,
            whole=generation.is_whole,
        )

    def grow(self, part: Part) -> None:
        """Record the tokens of a part."""
        self.tokens += part.tokens
        self._num_confirmed = len(self.tokens)

    async def end(self, generation: Generation, *, is_whole: bool) -> None:
        """Record the end of a generation: remove the stop string or token, or end the turn at the end of sequence."""
        self.usage += generation.usage
        if not is_whole:
            self._end_early(generation)
            return
        by_token = generation.reason == "stop" and not isinstance(generation.stop, str)
        ending, thinking = "", False
        try:
            if by_token and not self.chat.messages:
                self.edit(len(self.tokens) - 1, [])
            elif by_token:
                ending = await detokenize(generation.tokens[-1:], skip_special=False)
                thinking = (await own_model()).reasoning
            elif isinstance(generation.stop, str):
                await self._cut(generation)
        except BaseException:
            # The program has cancelled the task, for example by a timeout: the turn is recorded all the same.
            self._end_early(generation)
            raise
        if not self.chat.messages:
            self.base = len(self.tokens)
            return
        self.chat.said(generation.text, ending)
        if by_token:
            self._end_turn(generation, thinking=thinking)

    # Inside

    def _truncate(self, keep: int) -> None:
        self.sequence.truncate(keep)
        del self.tokens[keep:]
        self.masks = [mask for mask in self.masks if mask[0] <= keep]
        self._num_confirmed = min(self._num_confirmed, keep)

    def _repair(self) -> None:
        """Put tokens and masks on the sequence again that a command which failed may have left out. Raises the error of
        that command where the program has not heard of it."""
        if self.sequence.num_failures == self._num_failures:
            return
        tokens, masks = self.tokens, self.masks
        self.sequence.check()
        self._num_failures = self.sequence.num_failures
        self.tokens = tokens[:]
        self._truncate(self._num_confirmed)
        self.become(tokens, masks)

    def _give_up_by(self, release: Callable[[], None]) -> None:
        if self._release is None:
            self._release = release
        self._release_if_unneeded()

    def _release_if_unneeded(self) -> None:
        """Release the sequence if the context was given up and no fork is to be made of it."""
        if self._release is None or not self.sequence.is_open:
            return
        if any(isinstance(item, TokenBuffer) and item.sequence.is_open for item in self.pending):
            return
        if self.parent is None:
            self._release()
        else:
            # The host does not know this sequence, and the parent need not make it.
            self.sequence.close()
            self.parent._release_if_unneeded()

    def _branch(self, child: TokenBuffer) -> None:
        child.parent = None
        if child.sequence.is_open:
            self._repair()
            self.sequence.fork(child.sequence)
        child.tokens, child.base, child.last = list(self.tokens), self.base, self.last
        child.masks = list(self.masks)
        child._num_confirmed = self._num_confirmed
        child.chat = self.chat.copy()

    async def _fill(self, item: str | list[int]) -> None:
        """Append text or tokens; in a chat they belong to the assistant's turn."""
        if self.chat.messages and self.chat.turn is None:
            await self._render(True)
        # Nothing is awaited after the edit: a task that is cancelled has appended the item with its text, or neither.
        if isinstance(item, str):
            tokens, text = await tokenize(item, special=not self.tokens), item
        else:
            tokens, text = item, await detokenize(item, skip_special=False) if self.chat.messages else ""
        self.edit(len(self.tokens), tokens)
        if self.chat.messages:
            self.chat.said(text)
        else:
            self.base = len(self.tokens)

    async def _render(self, add_generation_prompt: bool) -> None:
        edit = await self.chat.edit(self.tokens[self.base :], add_generation_prompt=add_generation_prompt)
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
        """Drop the tokens that were not read. The text is then unknown: a part of it may have been held back."""
        if self.sequence.is_open:
            self.sequence.truncate(len(self.tokens))
        if self.chat.messages:
            self.chat.said(generation.text)
            self.chat.text = None
        else:
            self.base = len(self.tokens)

    async def _cut(self, generation: Generation) -> None:
        """Keep the tokens of the text, without those of the stop string."""
        tokens, start = generation.tokens, len(self.tokens) - len(generation.tokens)
        skip = not generation.special
        num = len(tokens)
        known = ""
        # Search from the end: a stop string covers few tokens.
        while num:
            num -= 1
            known = await detokenize(tokens[:num], skip_special=skip) if num else ""
            if generation.text.startswith(known):
                break
        rest = generation.text[len(known) :]
        self.edit(start + num, await tokenize(rest) if rest else [])
