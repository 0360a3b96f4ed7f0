"""Grammars written by programs and by requests are the same text."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from weft import sdk
from weft.core.grammar import Grammar


def test_a_choice_is_one_terminal_wherever_it_is_written() -> None:
    options = [f'option "{number}"' for number in range(5000)]
    written = sdk.choice(options)
    assert (written.kind, written.text) == ("lark", Grammar.choice(options).text)
    assert written.text.count("\n") == 1


@pytest.mark.parametrize("char", ["\x00", "\x1f", '"', "\\", "/", "\x7f", "\x85", "\u2028", "\ufeff", "\U0001f600"])
def test_every_character_can_be_in_a_choice(char: str) -> None:
    options = [f"a{char}b", "c"]
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(Grammar.choice(options).text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(options[0].encode())
    assert matcher.try_consume_tokens(data) == len(data)
    assert matcher.is_accepting()
