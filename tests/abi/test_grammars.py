"""Grammars written by programs and by requests are the same text."""

from __future__ import annotations

from weft import sdk
from weft.core.grammar import Grammar


def test_a_choice_is_one_terminal_wherever_it_is_written() -> None:
    options = [f'option "{number}"' for number in range(5000)]
    written = sdk.choice(options)
    assert (written.kind, written.text) == ("lark", Grammar.choice(options).text)
    assert written.text.count("\n") == 1
