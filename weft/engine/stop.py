"""Stop strings, matched on the bytes of tokens.

`StopMatcher` watches one generation. It knows tokens as bytes (`token_bytes`), never as text, so a stop string that
begins or ends inside a token, or inside a character, is found where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.sched.sequence import StopVerdict


class StopMatcher:
    """Finds the first stop string to be complete; of those that complete together, the one that starts first."""

    def __init__(self, stop: Sequence[bytes], token_bytes: Sequence[bytes]):
        self._stop = [text for text in stop if text]
        self._token_bytes = token_bytes
        self._longest = max((len(text) for text in self._stop), default=0)
        self._tail = b""
        """The last bytes generated, as far as a stop string that is not complete could reach back."""
        self._num_held = 0
        """Bytes at the end of `_tail` that are the beginning of some stop string."""

    def push(self, token: int, counts: bool) -> StopVerdict:
        """Look at the next token's bytes. Where `counts` is False, a complete stop string is let pass."""
        new = self._token_bytes[token]
        window = self._tail + new
        if counts:
            # What ends before the new token was let pass.
            old = len(self._tail) + 1
            ends = ((window.find(text, max(0, old - len(text))), text) for text in self._stop)
            found = [(at, -len(text), text) for at, text in ends if at >= 0]
            if found:
                at, _, text = min(found)
                return StopVerdict(0, text.decode("utf-8", "replace"), len(window) - at)
        keep = self._longest - 1
        self._tail = window[-keep:] if keep > 0 else b""
        self._num_held = self._held(self._tail, self._num_held + len(new))
        return StopVerdict(hold_bytes=self._num_held)

    def _held(self, tail: bytes, most: int) -> int:
        """Bytes at the end of `tail` that are the beginning of some stop string: at most `most`.

        A beginning without its new bytes was a beginning before them, so the number grows by no more than those. The
        sizes that are tried for all tokens together are therefore no more than twice the bytes."""
        for size in range(min(len(tail), most), 0, -1):
            end = tail[-size:]
            if any(text.startswith(end) for text in self._stop):
                return size
        return 0
