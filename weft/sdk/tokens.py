"""The Tokenize trait: tokenization and chat templates of the program's own model."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.abi.operations import Op
from weft.sdk.answers import Answer, ids_of, pack_ints, text_of
from weft.sdk.calls import Blobs
from weft.sdk.channel import current
from weft.sdk.main import encode


def tokenize(text: str, *, special: bool = False) -> Answer[list[int]]:
    """Tokenize a text. `special`: add the special tokens that the model expects around a text, such as the beginning of
    sequence. Names of special tokens in the text become these tokens."""
    return Answer(current().ask(Op.TOKENIZE, int(special), text.encode("utf-8", "surrogatepass")), ids_of)


def detokenize(tokens: Iterable[int], *, skip_special: bool = True) -> Answer[str]:
    """Detokenize token ids. `skip_special`: leave out special tokens."""
    return Answer(current().ask(Op.DETOKENIZE, int(skip_special), pack_ints(tokens)), text_of)


def vocabulary() -> Answer[list[bytes]]:
    """The bytes of every token, by id. The answer is large: request it once and keep it."""
    return Answer(current().ask(Op.VOCABULARY), _vocabulary)


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Answer[str]:
    """Render a chat with the model's template. `add_generation_prompt`: end with the beginning of the assistant's
    answer.

    Raises `InvalidRequest` for messages that the template refuses, `Unsupported` for a model without one.
    """
    rest = {
        "tools": list(tools) if tools else None,
        "documents": list(documents) if documents else None,
        "chat_template": chat_template,
        "template_kwargs": dict(template_kwargs) if template_kwargs else None,
    }
    call = current().ask(
        Op.RENDER,
        int(add_generation_prompt),
        encode(list(messages), "the messages"),
        encode({key: value for key, value in rest.items() if value is not None}, "the tools"),
    )
    return Answer(call, text_of)


def _vocabulary(blobs: Blobs) -> list[bytes]:
    lengths = struct.unpack(f"<{len(blobs[0]) // 4}I", blobs[0])
    tokens, start = [], 0
    for length in lengths:
        tokens.append(blobs[1][start : start + length])
        start += length
    return tokens
