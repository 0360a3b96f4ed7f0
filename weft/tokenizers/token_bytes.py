"""The bytes of every token of a vocabulary, derived from the tokenizer's decoder.

Owns the two families of open-weights models: byte-level BPE (each character of a token represents one byte) and
SentencePiece style (▁ represents a space, `<0xE2>` a byte without a token). Stop strings, grammars and detokenization
use these bytes. Knows neither files nor the meaning of special tokens.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from weft.abi.errors import ModelLoadError

MAX_TOKENS = 4 << 20
"""Of a vocabulary, ids without a token included: a list has an entry for each. The largest that is known has 0.3 M."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(NamedTuple):
    """The bytes of each token."""

    token_bytes: list[bytes]
    """By token id; empty for ids without a token."""
    strips_leading_space: bool
    """Whether decoding removes one leading space, which SentencePiece adds when encoding."""


def read_vocabulary(backend: tokenizers.Tokenizer) -> Vocabulary:
    """The bytes of all tokens. Raises `ModelLoadError` for a decoder of another family, by name, and for an id
    that is too large."""
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if size > MAX_TOKENS:
        raise ModelLoadError(f"tokenizer.json has the token id {size - 1}, at most {MAX_TOKENS - 1}; correct the file")
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return Vocabulary(_byte_level(vocab, size), False)
    replacements, has_bytes, strips = _sentencepiece(steps)
    token_bytes = [b""] * size
    for token, token_id in vocab.items():
        match = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        if match is not None:
            token_bytes[token_id] = bytes([int(match[1], 16)])
            continue
        for old, new in replacements:
            token = token.replace(old, new)
        token_bytes[token_id] = token.encode()
    return Vocabulary(token_bytes, strips)


def byte_level_alphabet() -> dict[int, str]:
    """The character of each byte in byte-level BPE (GPT-2): itself if it is printable Latin-1, otherwise the next
    unused one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


@functools.cache
def _byte_level_table() -> dict[int, str]:
    # Characters below U+0100 that represent no byte are mapped outside Latin-1, so that they are not taken for one.
    outside = dict.fromkeys(range(256), "\ue000")
    return outside | {ord(char): chr(byte) for byte, char in byte_level_alphabet().items()}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of byte-level BPE."""
    try:
        return token.translate(_byte_level_table()).encode("latin-1")
    except UnicodeEncodeError:
        # An added token, written as plain text.
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a token of SentencePiece with its usual replacements: ▁ is a space, and `<0xE2>` a byte."""
    match = _BYTE_TOKEN.fullmatch(token)
    return token.replace("▁", " ").encode() if match is None else bytes([int(match[1], 16)])


def _byte_level(vocab: Mapping[str, int], size: int) -> list[bytes]:
    token_bytes = [b""] * size
    for token, token_id in vocab.items():
        token_bytes[token_id] = byte_level_bytes(token)
    return token_bytes


def _decoder_steps(backend: tokenizers.Tokenizer) -> Sequence[Mapping[str, Any]]:
    if backend.decoder is None:
        raise ModelLoadError("tokenizer.json has no decoder, so tokens cannot be turned into text; add a ByteLevel one")
    spec: Mapping[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: Sequence[Mapping[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return steps


def _sentencepiece(steps: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, str]], bool, bool]:
    """The decoder's replacements, whether it has byte tokens, and whether it strips the leading space."""
    replacements: list[tuple[str, str]] = []
    has_bytes = strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                strips = step.get("prepend_scheme", "always") != "never"
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if start <= 1:
                strips = start == 1
            case _:
                raise ModelLoadError(
                    f"tokenizer.json uses the decoder {json.dumps(step)[:200]}; Weft serves byte-level BPE and "
                    "SentencePiece-style vocabularies (ByteLevel, or Replace/Metaspace, ByteFallback, Fuse, Strip)"
                )
    return replacements, has_bytes, strips
