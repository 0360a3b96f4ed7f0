"""Grammars as values: what a generated text must look like.

Compiled and followed in the engine (`weft.engine.grammar`), where the tokens are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """The generated text, from its first token to the end of sequence, belongs to this language."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """A JSON schema as JSON; a regular expression (without look-around and back-references) that matches the whole
    text; or a grammar in llguidance's dialect of Lark."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """A JSON value that the schema allows; `True` or `{}` allow any."""
        return cls("json_schema", json.dumps(schema, separators=(",", ":"), ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that the expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """One of the options, to the letter."""
        if not options:
            raise ValueError("a choice needs at least one option")
        return cls("lark", "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar, in llguidance's dialect of Lark; its start symbol is `start`."""
        return cls("lark", text)
