"""`ChoiceText`: the tokens of one choice of a completion become chunks of text.

Owns the choice's detokenizer and the cutting of stop strings. Called by the completion program, and by the beam search
for whole beams.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from weft.core.wire import Finished, Token
from weft.programs.runtime import Runtime
from weft.programs.types import Chunk
from weft.tokenizers.detokenize import IncrementalDetokenizer


class Shown(Protocol):
    """The arguments of a program that decide which tokens become text."""

    @property
    def include_stop(self) -> bool:
        """Whether the text keeps the stop string or token that ended it."""

    @property
    def skip_special_tokens(self) -> bool:
        """Whether special tokens are left out."""


class ChoiceText:
    """One choice so far: its text, and the tokens behind which another engine can continue it."""

    def __init__(self, index: int, shown: Shown, rt: Runtime, is_enough: Callable[[str], bool] | None = None):
        """`is_enough` sees the text token by token; once it returns True, further tokens are dropped."""
        self.index = index
        self.tokens = array("i")
        """int32; those in the chunks so far."""
        self.has_enough = False
        """Whether `is_enough` has returned True."""
        self.ended = False
        """Whether its last chunk has been made."""
        self._is_enough = is_enough
        self._include_stop = shown.include_stop
        self._eos = frozenset(rt.engine.info.eos_token_ids)
        self._tokenizer = rt.tokenizer
        # A choice goes on where the prompt ends, so a leading space in it is one.
        self._text = IncrementalDetokenizer(rt.tokenizer, skip_special=shown.skip_special_tokens, continues=True)
        self._skip_special = shown.skip_special_tokens
        self._last = -1

    def stop_text(self, finished: Finished) -> str:
        """The text of the stop that ended it, where the chunks leave it out."""
        if self._include_stop:
            return ""
        if isinstance(finished.stop, str):
            return finished.stop
        is_cut = self._ended_by_token(finished)
        return self._tokenizer.decode([self._last], skip_special=self._skip_special) if is_cut else ""

    def chunk(self, tokens: Sequence[Token], finished: Finished | None) -> Chunk:
        """The chunk of these tokens, and of the end of the generation where it is given."""
        if self._is_enough is None or not (tokens or self.has_enough):
            return self._chunk(tokens, finished)
        chunk = Chunk(index=self.index)
        for number, token in enumerate(tokens, 1):
            if self.has_enough:
                return chunk
            following = self._chunk([token], finished if number == len(tokens) else None)
            chunk = msgspec.structs.replace(
                following,
                text=chunk.text + following.text,
                tokens=chunk.tokens + following.tokens,
                logprobs=chunk.logprobs + following.logprobs,
            )
            self.has_enough = self._is_enough(following.text)
        return chunk

    def _chunk(self, tokens: Sequence[Token], finished: Finished | None) -> Chunk:
        hold = 0
        ids, logprobs = [], []
        for token in tokens:
            ids.append(token.token)
            hold = token.hold_bytes
            if token.logprobs is not None:
                logprobs.append(token.logprobs)
        self.tokens.extend(ids)
        self._last = ids[-1] if ids else self._last
        if finished is None:
            text = self._text.push(ids, hold)
            return Chunk(index=self.index, text=text, tokens=tuple(ids), logprobs=tuple(logprobs))
        # What is cut must not be shown a moment earlier: the end came with the tokens that it cuts.
        cut = self._cut_bytes(finished)
        text = self._text.push(ids, cut) + self._text.finish(cut)
        return Chunk(
            index=self.index,
            text=text,
            tokens=tuple(ids),
            logprobs=tuple(logprobs),
            finish_reason=finished.reason,
            stop=finished.stop,
            usage=finished.usage,
        )

    def _cut_bytes(self, finished: Finished) -> int:
        """How many of the last bytes are not part of the text."""
        if isinstance(finished.stop, str):
            # What follows a stop string in its last token never counts.
            return finished.cut_bytes - (len(finished.stop.encode()) if self._include_stop else 0)
        if self._ended_by_token(finished) and not self._include_stop:
            return max(finished.cut_bytes, len(self._tokenizer.bytes_of(self._last)))
        return 0 if self._include_stop else finished.cut_bytes

    def _ended_by_token(self, finished: Finished) -> bool:
        return finished.reason == "stop" and (self._last == finished.stop or self._last in self._eos)
