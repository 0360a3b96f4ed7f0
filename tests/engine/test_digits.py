"""Numbers in JSON under a grammar end: runs of digits are bounded, digits in strings are not."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from weft.core.grammar import Grammar
from weft.engine.digits import DigitRun, DigitTokens
from weft.llm import LLM

TOKENS = [b"1", b"23", b"456", b",", b"1,", b'"', b"\\", b"a", b".", b"", b"}"]
ALL = (1 << len(TOKENS)) - 1


def allowed(texts: list[bytes], limit: int, mask: int = ALL) -> set[bytes]:
    """The tokens that are allowed after these, of those that a grammar allows."""
    run = DigitRun(DigitTokens(TOKENS), limit)
    for text in texts:
        run.push(TOKENS.index(text))
    words = np.array([mask], np.uint32)
    run.bound(words)
    return {token for number, token in enumerate(TOKENS) if words[0] >> number & 1}


def without(*tokens: bytes) -> set[bytes]:
    return set(TOKENS) - set(tokens)


def test_a_run_of_digits_ends_at_the_limit() -> None:
    assert allowed([], 4) == without()
    assert allowed([b"1"], 4) == without()
    assert allowed([b"23"], 4) == without(b"456")
    assert allowed([b"1", b"23"], 4) == without(b"23", b"456")
    assert allowed([b"456", b"1"], 4) == without(b"1", b"23", b"456", b"1,")
    assert allowed([b"456", b"456"], 4) == without(b"1", b"23", b"456", b"1,")


def test_another_character_begins_a_new_run() -> None:
    assert allowed([b"456", b"1", b"."], 4) == without()
    assert allowed([b"456", b"1,"], 4) == without()
    assert allowed([b"456", b"1", b""], 4) == without(b"1", b"23", b"456", b"1,")


def test_digits_of_strings_are_not_bounded() -> None:
    quote, backslash = TOKENS[5], TOKENS[6]
    assert allowed([quote, b"456", b"456"], 4) == without()
    assert allowed([quote, backslash, quote, b"456", b"456"], 4) == without()
    assert allowed([quote, backslash, backslash, quote, b"456", b"1"], 4) == without(b"1", b"23", b"456", b"1,")


def test_digits_that_the_grammar_needs_are_allowed() -> None:
    assert allowed([b"456", b"1"], 4, mask=0b11) == {b"1", b"23"}


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_come_to_an_end(kind: str) -> None:
    options = {"dtype": "float32", "device": "cpu", "num_pages": 100, "max_context": 512, "threads": 2}
    with LLM("weft-tiny", json_string_chars=20, **options) as llm:
        digits = [t for t, data in enumerate(llm.tokenizer.token_bytes) if data.isdigit() and data[:1] != b"0"]
        biases = dict.fromkeys(digits[:1024], 40.0)

        def written(schema: dict) -> str:
            endless = {"logit_bias": biases, "temperature": 0.0, "max_tokens": 200}
            return llm.generate("x", grammar=Grammar.json_schema(schema), **endless)[0].text

        text = written({"type": "array", "items": {"type": kind}, "minItems": 2, "maxItems": 2})
        assert len(json.loads(text)) == 2
        assert max(map(len, re.findall(r"\d+", text))) == 20
        endless = written({"type": kind, "x-guidance": {"max_string_chars": None}})
        assert len(endless) > 100
        assert len(written({"type": "string", "pattern": "^[0-9]{30}$"})) == 32
