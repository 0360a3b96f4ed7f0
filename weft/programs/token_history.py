"""`TokenHistory`: the tokens of a sequence as the host knows them, and the masks among them.

Owns the sharing between forks: what two sequences have in common is kept once, however many forks a program makes. Used
by `weft.programs.lasting`.
"""

from __future__ import annotations

from array import array

Masked = tuple[int, bytes]
"""(number of tokens before it, packed ranges of hidden tokens) of a mask."""


class TokenHistory:
    """int32 tokens that grow at their end, are cut, and are forked. A fork costs the same for any number of tokens."""

    __slots__ = ("_before", "_own", "_start", "masks")

    def __init__(self, before: TokenHistory | None = None, masks: tuple[Masked, ...] = ()):
        """`before`: the tokens that these follow, which do not change any more."""
        self._before = before
        self._start = 0 if before is None else len(before)
        self._own = array("i")
        self.masks = masks
        """In the order of their places. Each holds for the tokens from its place to that of the next one."""

    def __len__(self) -> int:
        return self._start + len(self._own)

    def extend(self, tokens: array[int] | bytes) -> None:
        """Add tokens: an array, or packed int32."""
        if isinstance(tokens, bytes):
            self._own.frombytes(tokens)
        else:
            self._own.extend(tokens)

    def mask(self, ranges: bytes) -> None:
        """A mask holds from here on, in place of the one before."""
        place = len(self)
        self.masks = (*(mask for mask in self.masks if mask[0] < place), (place, ranges))

    def cut(self, num_tokens: int) -> None:
        """Forget the tokens past the first `num_tokens`, and the masks that were set when there were more."""
        while num_tokens < self._start:
            before = self._before
            assert before is not None, "only what follows other tokens starts behind the first"
            self._own = before._own[: max(0, num_tokens - before._start)]
            self._start, self._before = before._start, before._before
        del self._own[num_tokens - self._start :]
        self.masks = tuple(mask for mask in self.masks if mask[0] <= num_tokens)

    def fork(self) -> TokenHistory:
        """A copy, which shares the tokens up to here."""
        if self._own:
            shared = TokenHistory(self._before)
            shared._own, self._own = self._own, array("i")
            self._before, self._start = shared, len(shared)
        return TokenHistory(self._before, self.masks)

    def tokens(self) -> array[int]:
        """A new array of all tokens, those of the histories that this one continues first."""
        parts: list[array[int]] = []
        history: TokenHistory | None = self
        while history is not None:
            parts.append(history._own)
            history = history._before
        tokens = array("i")
        for part in reversed(parts):
            tokens.extend(part)
        return tokens
