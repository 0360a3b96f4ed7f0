"""Grammars as values: what a generated text must look like.

Compiled and followed in the engine (`weft.engine.grammar`), where the tokens are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from weft.abi.grammars import choice_as_lark


class Trigger(msgspec.Struct, frozen=True, array_like=True):
    """A marker from which on a grammar holds. The text before it is free, and so is its length."""

    marker: str
    """Its text, also where it is a special token."""
    repeats: bool = True
    """After a complete match the text is free until the marker comes again; otherwise it ends there."""
    reasoning: tuple[str, str] | None = None
    """Tags of reasoning that the text may begin with. The marker means nothing between them."""
    in_reasoning: bool = False
    """The text begins behind the opening tag."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """The generated text, from its first token to the end of sequence, belongs to this language."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """A JSON schema as JSON; a regular expression (without look-around and back-references) that matches the whole
    text; or a grammar in llguidance's dialect of Lark."""
    trigger: Trigger | None = None
    """Where the grammar begins to hold; None: with the first token. With a trigger, the grammar describes texts without
    the marker, and texts that end with the marker and what must follow it."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """A JSON value that the schema allows; `True` or `{}` allow any."""
        return cls("json_schema", json.dumps(schema, separators=(",", ":"), ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Grammar:
        """JSON objects with any content."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that the expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """Exactly one of the options."""
        if not options:
            raise ValueError("a choice needs at least one option")
        return cls("lark", choice_as_lark(options))

    @classmethod
    def lark(cls, text: str, trigger: Trigger | None = None) -> Grammar:
        """A context-free grammar, in llguidance's dialect of Lark; its start symbol is `start`."""
        return cls("lark", text, trigger)
