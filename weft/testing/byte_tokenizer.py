"""A tokenizer whose tokens are bytes, for tests and for `FakeEngine`."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from weft.tokenizers.token_bytes import byte_level_alphabet
from weft.tokenizers.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")
"""Tokens 256, 257 and 258."""


def byte_tokenizer(chat_template: str | None = CHATML, *, special: Sequence[str] = ()) -> Tokenizer:
    """Token i below 256 is byte i; 256 ends a text; 257 and 258 begin and end a message. `special` are further special
    tokens, from 259."""
    vocab = {char: byte for byte, char in byte_level_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    added = (*SPECIAL, *special)
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in added])
    return Tokenizer(
        backend,
        special_tokens={"eos_token": SPECIAL[0]},
        chat_templates={} if chat_template is None else {"default": chat_template},
        name="bytes",
    )
