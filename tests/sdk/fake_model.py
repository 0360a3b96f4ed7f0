"""A model that fits into a page: bytes and a few special tokens, ChatML, and a distribution that is a hash of what it
sees. The same visible tokens give the same distribution, whether they came by a sequence or by pages."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|end|>")
BOS, IM_START, IM_END, END = range(256, 260)
VOCAB = 260
PAGE = 16
INFO: dict[str, Any] = {
    "name": "fake",
    "traits": [
        *("Core", "Messaging", "Allocate", "Forward", "InputText", "Tokenize", "OutputText", "Sequence", "Store"),
    ],
    "vocab_size": VOCAB,
    "page_size": PAGE,
    "max_context": 4096,
    "eos_token_ids": [IM_END],
    "hidden_size": 8,
    "dtype": "float32",
    "device": "fake",
    "chat_template": True,
    "tool_call_parser": "hermes",
    "reasoning": False,
    "something_new": 1,
}


def encode(text: str, special: bool = False) -> list[int]:
    """Bytes, with the names of special tokens as these."""
    tokens = [BOS] if special else []
    at = 0
    while at < len(text):
        name = next((name for name in SPECIAL if text.startswith(name, at)), None)
        if name is not None:
            tokens.append(256 + SPECIAL.index(name))
            at += len(name)
        else:
            tokens += text[at].encode()
            at += 1
    return tokens


def decode(tokens: Sequence[int], skip_special: bool = True) -> str:
    """The text of tokens."""
    data = b"".join(
        bytes([token]) if token < 256 else b"" if skip_special else SPECIAL[token - 256].encode() for token in tokens
    )
    return data.decode("utf-8", "replace")


def render(messages: Sequence[Mapping[str, Any]], cue: bool, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """ChatML; calls of tools as Hermes writes them, and no reasoning of earlier turns."""
    text = ""
    if tools:
        text += f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n"
    for message in messages:
        content = message.get("content") or ""
        for call in message.get("tool_calls") or ():
            function = call["function"]
            content += (
                f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
            )
        text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n" if cue else "")


def distribution(seen: Sequence[int]) -> list[float]:
    """Log-probabilities [vocabulary] of what follows."""
    rng = random.Random(zlib.crc32(repr(list(seen)).encode()))
    logits = [6 * rng.random() for _ in range(VOCAB)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def top(seen: Sequence[int], k: int) -> list[tuple[int, float]]:
    """The `k` most probable tokens with their log-probabilities."""
    logprobs = distribution(seen)
    return [(token, logprobs[token]) for token in sorted(range(VOCAB), key=lambda token: -logprobs[token])[:k]]
