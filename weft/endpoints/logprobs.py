"""Log-probabilities in the forms of the chat and completion APIs.

A token is bytes and may be part of a character. The chat form has the field `bytes` for this. The completion form
writes tokens that are not valid UTF-8 as `bytes:\\xe2\\x82`, as OpenAI does.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from weft.core.wire import TokenLogprobs
from weft.endpoints.schemas.chat import ChatLogprobs, TokenLogprob, TopLogprob
from weft.endpoints.schemas.common import PromptLogprob, PromptLogprobs
from weft.endpoints.schemas.completion import CompletionLogprobs

TokenBytes = Callable[[int], bytes]

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


def chat_logprobs(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> ChatLogprobs:
    """One entry per token of a chunk."""
    content = []
    for token, entry in zip(tokens, logprobs, strict=True):
        tops = [
            TopLogprob(_text(data), finite(logprob), list(data))
            for data, logprob in zip(map(token_bytes, entry.top_ids), entry.top_logprobs, strict=True)
        ]
        data = token_bytes(token)
        content.append(TokenLogprob(_text(data), finite(entry.logprob), list(data), tops))
    return ChatLogprobs(content)


def prompt_logprobs(
    tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], token_bytes: TokenBytes, num_tops: int
) -> PromptLogprobs:
    """Per prompt token: token id -> log-probability, for the token itself and the `num_tops` most probable ones."""
    result: PromptLogprobs = []
    for token, entry in zip(tokens, entries, strict=True):
        if entry is None:
            result.append(None)
            continue
        candidates = {
            str(top): PromptLogprob(finite(logprob), rank, _text(token_bytes(top)))
            for rank, (top, logprob) in enumerate(zip(entry.top_ids[:num_tops], entry.top_logprobs, strict=False), 1)
        }
        candidates[str(token)] = PromptLogprob(finite(entry.logprob), entry.rank, _text(token_bytes(token)))
        result.append(candidates)
    return result


class CompletionLogprobsWriter:
    """The parallel lists of the completion API, for one choice, chunk by chunk.

    `is_shown(token)` says whether a token is part of the text, which may leave out special tokens. `num_tops` is the
    number of most probable tokens reported beside the chosen one. With `strips_space` the text has no space that its
    first token begins with.
    """

    def __init__(
        self, token_bytes: TokenBytes, is_shown: Callable[[int], bool], num_tops: int, *, strips_space: bool = False
    ):
        self._token_bytes = token_bytes
        self._is_shown = is_shown
        self._num_tops = num_tops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._strips_space = strips_space

    def write(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """The lists for the next tokens. The entry of a token without a prediction (the first of a prompt) is None."""
        result = CompletionLogprobs([], [], [], [])
        for token, entry in zip(tokens, entries, strict=True):
            data = self._token_bytes(token)
            result.tokens.append(_quoted(data))
            result.text_offset.append(self._offset)
            shown = data if self._is_shown(token) else b""
            if self._strips_space and shown:
                self._strips_space = False
                shown = shown.removeprefix(b" ")
            self._offset += len(self._decoder.decode(shown))
            result.token_logprobs.append(None if entry is None else finite(entry.logprob))
            result.top_logprobs.append(None if entry is None else self._tops(data, entry))
        return result

    def _tops(self, chosen: bytes, entry: TokenLogprobs) -> dict[str, float]:
        tops: dict[str, float] = {}
        for top, logprob in zip(entry.top_ids[: self._num_tops], entry.top_logprobs, strict=False):
            # Most probable first: of two tokens with the same text, the more probable one is reported.
            tops.setdefault(_quoted(self._token_bytes(top)), finite(logprob))
        tops.setdefault(_quoted(chosen), finite(entry.logprob))
        return tops


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _quoted(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """The log-probability, or `LEAST_LOGPROB` for minus infinity."""
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB
