"""Texts of grammars that both the engine's side and programs write."""

from __future__ import annotations

import json
from collections.abc import Iterable


def choice_as_lark(options: Iterable[str]) -> str:
    """A grammar in Lark for exactly one of the options.

    The options are one terminal, hence one automaton: a rule of as many alternatives would be parsed one by one.
    """
    # JSON writes U+007F as it is; literals of Lark take no control characters.
    texts = " | ".join(json.dumps(option, ensure_ascii=False).replace("\x7f", "\\u007f") for option in options)
    return f"start: CHOICE\nCHOICE: {texts}"
