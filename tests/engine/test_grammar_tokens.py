"""Grammars over tokenizers whose own tokens of a text may have other bytes than the text."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from weft import Grammar
from weft.endpoints.dialect import Dialect
from weft.endpoints.grammars import CallableTool, Calls, answer_grammar
from weft.engine.grammar import Grammars, _Vocabulary
from weft.engine.grammar_text import MAX_JSON_STRING_CHARS, translated
from weft.engine.guide import Guide
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.tokenizers.token_bytes import byte_level_alphabet
from weft.tokenizers.tokenizer import Tokenizer

OBJECT = {"type": "object"}
INTEGER = {"type": "integer"}


def sentencepiece(kind: str) -> Tokenizer:
    """A small tokenizer of SentencePiece that puts a space before a text, as Llama 2 and Mistral 7B do."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += "▁" + "".join(map(chr, range(33, 127)))
    pairs = 'y e, ye s, ▁ yes, n o, ▁ no, ▁ {, { ", ▁ {", " :, n a, m e, na me, ▁ ", ▁ [, ▁ name, [ T, ▁ [T'
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in pairs.split(", "))]
    vocab = {token: number for number, token in enumerate(dict.fromkeys([*tokens, *map("".join, merges)]))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"}, name=kind)


def composing() -> Tokenizer:
    """A small tokenizer of bytes that composes characters first (NFC), as Qwen does."""
    vocab = {char: byte for byte, char in byte_level_alphabet().items()}
    merges = [("c", "a"), ("f", "e"), ("ca", "fe")]
    vocab |= {left + right: 256 + number for number, (left, right) in enumerate(merges)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<|end|>"}, name="nfc")


OSLO = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]} | OBJECT
REQUIRED = answer_grammar(
    Dialect("mistral"), Calls([CallableTool("weather", OSLO)], only_one=True), None, reasoning_opened=False
)
NAMED = {"type": "object", "properties": {"name": INTEGER, "no": {"type": "boolean"}}, "required": ["name", "no"]}
FORMS = {
    "choice": Grammar.choice(["yes", "no", "a yes"]),
    "one option": Grammar.choice(["yes"]),
    "an option with a space": Grammar.choice([" yes"]),
    "the text of a special token": Grammar.choice(["no </s> yes"]),
    "half a character at the fork": Grammar.choice(["é yes", "è no"]),
    "composed and not": Grammar.choice(["cafe\u0301", "café"]),
    "not composed": Grammar.choice(["cafe\u0301 cafe\u0301"]),
    "an object": Grammar.json_object(),
    "required keys": Grammar.json_schema(NAMED | OBJECT),
    "an array": Grammar.json_schema({"type": "array", "items": INTEGER, "minItems": 1}),
    "a call": REQUIRED,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "tokenizer", [sentencepiece("prepend"), sentencepiece("metaspace"), composing()], ids=lambda made: made.name
)
def test_tokens_that_are_allowed_lead_to_texts_of_the_grammar(tokenizer: Tokenizer, form: str) -> None:
    """Also where the tokenizer's own tokens of a text have other bytes than the text."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    grammars = Grammars(tokenizer.token_bytes, tokenizer.special_ids, tokenizer.eos_token_ids, encode)
    try:
        for seed in range(20):
            data, is_over = walk(grammars.guide(FORMS[form]), tokenizer, random.Random(seed))
            over_bytes = LLMatcher(LLTokenizer("byte"), translated(FORMS[form], MAX_JSON_STRING_CHARS), log_level=0)
            assert over_bytes.try_consume_tokens(list(data)) == len(data), data
            assert over_bytes.is_accepting() or not is_over, data
    finally:
        grammars.close()


def walk(guide: Guide, tokenizer: Tokenizer, rng: random.Random) -> tuple[bytes, bool]:
    """Follow tokens that are allowed, drawn evenly: their bytes, and whether the text came to its end."""
    data = b""
    for _ in range(200):
        assert guide.matcher is not None
        bits = np.unpackbits(np.frombuffer(guide.matcher.compute_bitmask(), np.uint8), bitorder="little")
        token = rng.choice(np.flatnonzero(bits).tolist())
        if token in tokenizer.eos_token_ids:
            return data, True
        is_over = guide.push(token)
        assert not guide.error, data
        data += tokenizer.bytes_of(token)
        if is_over:
            return data, True
    return data, False


def test_the_models_tokens_of_a_text_have_its_bytes() -> None:
    """The tokenizer's own tokens where their bytes are the text's, else the longest at each place."""

    def tokens_of(tokenizer: Tokenizer, text: str) -> list[bytes]:
        vocabulary = _Vocabulary(
            tokenizer.token_bytes, tokenizer.special_ids, 0, partial(tokenizer.encode, add_special_tokens=False)
        )
        return [tokenizer.bytes_of(token) for token in vocabulary(text)]

    for kind in ("prepend", "metaspace"):
        assert tokens_of(sentencepiece(kind), "yes no") == [b"yes", b" no"]
        assert tokens_of(sentencepiece(kind), " yes") == [b" yes"]
        assert tokens_of(sentencepiece(kind), "") == []
        assert tokens_of(sentencepiece(kind), '{"</s>') == [b'{"', b"<", b"/", b"s", b">"]
    assert tokens_of(composing(), "café") == [b"ca", b"f", b"\xc3", b"\xa9"]
    assert tokens_of(composing(), "cafe\u0301") == [b"cafe", b"\xcc", b"\x81"]
    assert tokens_of(byte_tokenizer(), "a<|end|>")[:3] == [b"a", b"<", b"|"]
