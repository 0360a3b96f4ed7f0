"""Grammars as values, and `Matcher` for programs that choose tokens themselves.

await ctx.generate(grammar=json_schema({"type": "object", "properties": {"age": {"type": "integer"}}}))
await ctx.generate(grammar=choice(["yes", "no"]))
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.abi.errors import InvalidRequest
from weft.abi.grammars import choice_as_lark
from weft.abi.operations import Op
from weft.sdk.answers import Answer, dump, pack_ints
from weft.sdk.calls import Blobs
from weft.sdk.channel import Channel, OwnedResource, current


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that the generated text, from its first token to the end of sequence, must belong to."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    def to_json(self) -> dict[str, str]:
        """The grammar as JSON values, in the form of the wire."""
        return {"kind": self.kind, "text": self.text}


def json_schema(schema: Mapping[str, Any] | bool) -> Grammar:
    """The grammar of JSON values that the schema allows; `True` or `{}` allow any value."""
    return Grammar("json_schema", json.dumps(schema, separators=(",", ":"), ensure_ascii=False))


def json_object() -> Grammar:
    """The grammar of JSON objects with any content."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Grammar:
    """The grammar of texts that match the whole expression; look-around and back-references are not supported."""
    return Grammar("regex", pattern)


def choice(options: Sequence[str]) -> Grammar:
    """The grammar of texts that equal one of the options."""
    if not options or isinstance(options, str):
        raise InvalidRequest("a choice needs a list of at least one option", "options")
    return Grammar("lark", choice_as_lark(options))


def lark(text: str) -> Grammar:
    """A context-free grammar in llguidance's dialect of Lark; its start symbol is `start`."""
    return Grammar("lark", text)


def ebnf(rules: str) -> Grammar:
    """A context-free grammar in the notation `root ::= "a" item*` (GBNF); its start symbol is `root`.

    Strings and character classes `[a-z]` with escapes, `.`, groups, `|`, `*`, `+`, `?`, `{m,n}`, and comments after
    `#`.
    """
    from weft.text.gbnf import to_lark

    return Grammar("lark", to_lark(rules))


class Allowed:
    """The set of tokens that may come next, one bit each."""

    __slots__ = ("_bits", "done")

    def __init__(self, bits: bytes, done: bool = False):
        self._bits = bits
        self.done = done
        """Whether the text is complete and only the end of sequence may follow."""

    def __contains__(self, token: object) -> bool:
        """Whether the token may come next."""
        if not isinstance(token, int) or not 0 <= token < 8 * len(self._bits):
            return False
        return bool(self._bits[token >> 3] >> (token & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        """The tokens, in order."""
        for at, byte in enumerate(self._bits):
            if byte:
                yield from (8 * at + bit for bit in range(8) if byte >> bit & 1)

    def __len__(self) -> int:
        """The number of tokens that may come next."""
        return int.from_bytes(self._bits, "little").bit_count()


class Matcher(OwnedResource):
    """The state of a grammar, advanced token by token by a program that chooses the tokens itself.

    async with Matcher(json_object()) as matcher:
        allowed = await matcher.push([])            # before the first token
        token = dist.keep(allowed).max_index()
        allowed = await matcher.push([token])
    """

    noun = "matcher"
    release_op = Op.MATCHER_CLOSE

    def __init__(self, grammar: Grammar, channel: Channel | None = None):
        super().__init__(channel or current())
        opened = self.channel.ask(Op.MATCHER_OPEN, self.number, dump(grammar.to_json()), owner=self)
        opened.spill = True

    def push(self, tokens: Iterable[int] = ()) -> Answer[Allowed]:
        """Advance by these tokens and return the tokens that may follow. Raises `InvalidRequest` for a token that was
        not allowed, or an invalid grammar."""
        self.check()
        return Answer(self.channel.ask(Op.MATCHER_PUSH, self.number, pack_ints(tokens), owner=self), _allowed)


def _allowed(blobs: Blobs) -> Allowed:
    return Allowed(blobs[1], blobs[0] == b"\1")
