r"""Translates grammars in GBNF (llama.cpp's notation, `root ::= "a" item*`) to the engine's dialect of Lark.

Strings, character classes and `.` are decoded and encoded again, because escapes differ; rule names become unique
lower-case identifiers; comments are dropped. Groups, `|`, `*`, `+`, `?` and `{m,n}` are the same in both. A rule ends
where the next one begins: line breaks are not significant.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from weft.abi.errors import InvalidRequest

START = "root"
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_CODES = {"x": 2, "u": 4, "U": 8}
"""Numeric escapes, with their number of hexadecimal digits."""
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
"""Characters without a special meaning in regular expressions."""


class GbnfToken(NamedTuple):
    """A token of the grammar; `text` is Lark, except for names."""

    kind: str
    """`name`, `defines`, `item` (a string or a class), `open`, `close`, `or`, or `suffix` (a repetition)."""
    text: str
    line: int


def to_lark(rules: str) -> str:
    """The grammar in Lark. Raises `InvalidRequest` with the line of an error."""
    tokens = _Scanner(rules).tokens()
    names = _names(tokens)
    if START not in names:
        raise InvalidRequest(f"the grammar has no rule {START}; write `{START} ::= ...`", "grammar")
    lines: list[list[str]] = []
    opened: list[int] = []
    before = ""
    for at, (kind, text, line) in enumerate(tokens):
        defined = kind == "name" and _is_rule(tokens, at)
        if opened and defined:
            raise _wrong(opened[-1], "opens a group that the rule does not close")
        if defined:
            lines.append([names[text], ":"])
        elif kind == "defines":
            if before != "rule":
                raise _wrong(line, "has ::= without a rule's name before it")
        elif not lines:
            raise InvalidRequest(f"line {line} of the grammar comes before any rule: {text}", "grammar")
        elif kind == "name":
            if text not in names:
                raise _wrong(line, f"refers to an undefined rule: {text}")
            lines[-1].append(names[text])
        elif kind == "suffix":
            if before not in ("item", "name", "close"):
                raise _wrong(line, f"has {text} without an item before it to repeat; use parentheses")
            lines[-1][-1] += text
        else:
            if kind == "open":
                opened.append(line)
            elif kind == "close" and not opened:
                raise _wrong(line, "closes a group that was not opened")
            elif kind == "close":
                opened.pop()
            lines[-1].append(text)
        before = "rule" if defined else kind
    if opened:
        raise _wrong(opened[-1], "opens a group that the rule does not close")
    return "\n".join(" ".join(line) for line in lines) + "\n"


class _Scanner:
    """Lexer of a grammar."""

    def __init__(self, rules: str):
        self._rules = rules
        self._at = 0
        self._line = 1

    def tokens(self) -> list[GbnfToken]:
        found: list[GbnfToken] = []
        while self._at < len(self._rules):
            char = self._rules[self._at]
            if char == "\n":
                self._line += 1
                self._at += 1
            elif char.isspace():
                self._at += 1
            elif char == "#":
                end = self._rules.find("\n", self._at)
                self._at = len(self._rules) if end < 0 else end
            else:
                line = self._line
                kind, text = self._token(char)
                found.append(GbnfToken(kind, text, line))
        return found

    def _token(self, char: str) -> tuple[str, str]:
        """Kind and text of the token at this position."""
        if char in _NAME:
            return "name", self._word()
        if self._rules.startswith("::=", self._at):
            self._at += 3
            return "defines", "::="
        self._at += 1
        match char:
            case '"':
                return "item", self._string()
            case "[":
                return "item", self._class()
            case ".":
                return "item", "/(?s:.)/"
            case "(":
                return "open", char
            case ")":
                return "close", char
            case "|":
                return "or", char
            case "*" | "+" | "?":
                return "suffix", char
            case "{":
                return "suffix", self._count()
            case _:
                raise _wrong(self._line, f"has an unexpected character: {char}")

    def _word(self) -> str:
        start = self._at
        while self._at < len(self._rules) and self._rules[self._at] in _NAME:
            self._at += 1
        return self._rules[start : self._at]

    def _string(self) -> str:
        chars: list[str] = []
        while (char := self._char('"'))[0]:
            chars.append(char[0])
        # JSON writes U+007F as it is; literals of Lark take no control characters.
        return json.dumps("".join(chars), ensure_ascii=False).replace("\x7f", "\\u007f")

    def _class(self) -> str:
        """The regular expression of a character class, after its opening bracket."""
        negated = self._rules.startswith("^", self._at)
        self._at += negated
        ranges: list[str] = []
        char, _ = self._char("]")
        while char:
            following, escaped = self._char("]")
            if following == "-" and not escaped:
                last, _ = self._char("]")
                if not last:
                    ranges += [_in_class(char), _in_class("-")]
                    break
                if last < char:
                    raise _wrong(self._line, f"has a class whose range ends before it begins: {char}-{last}")
                ranges.append(f"{_in_class(char)}-{_in_class(last)}")
                following, _ = self._char("]")
            else:
                ranges.append(_in_class(char))
            char = following
        if not ranges:
            raise _wrong(self._line, "has an empty class; write . for any character")
        return f"/[{'^' if negated else ''}{''.join(ranges)}]/"

    def _char(self, last: str) -> tuple[str, bool]:
        """The next character of a string or class, and whether it was escaped; empty after `last`, the delimiter."""
        if self._at >= len(self._rules) or self._rules[self._at] == "\n":
            raise _wrong(self._line, "has an unterminated string or class")
        char = self._rules[self._at]
        self._at += 1
        if char != "\\":
            return ("" if char == last else char), False
        code = self._rules[self._at : self._at + 1]
        self._at += 1
        if code in _CODES and code:
            return self._coded(code), True
        if not code or code == "\n" or (code in _PLAIN and code not in _ESCAPES):
            raise _wrong(self._line, f"has an unknown escape: \\{code.strip()}")
        return _ESCAPES.get(code, code), True

    def _coded(self, code: str) -> str:
        digits = self._rules[self._at : self._at + _CODES[code]]
        self._at += len(digits)
        try:
            char = chr(int(digits, 16)) if len(digits) == _CODES[code] and digits.isalnum() else "\ud800"
            char.encode()
        except (ValueError, OverflowError) as error:
            raise _wrong(self._line, f"has an escape of an invalid character: \\{code}{digits}") from error
        return char

    def _count(self) -> str:
        """A repetition, after its opening brace."""
        end = self._rules.find("}", self._at)
        text = self._rules[self._at : end] if end >= 0 else ""
        counts = [part.strip() for part in text.split(",")]
        if not (len(counts) <= 2 and counts[0].isdecimal() and (counts[-1].isdecimal() or not counts[-1])):
            raise _wrong(self._line, "has an invalid repetition; write {2}, {2,} or {2,5}")
        self._line += text.count("\n")
        self._at = end + 1
        return "{" + ",".join(counts) + "}"


def _wrong(line: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"line {line} of the grammar {what}", "grammar")


def _in_class(char: str) -> str:
    """A character, escaped for a regular expression's brackets."""
    return char if char in _PLAIN else f"\\x{{{ord(char):X}}}"


def _is_rule(tokens: list[GbnfToken], at: int) -> bool:
    return at + 1 < len(tokens) and tokens[at + 1].kind == "defines"


def _names(tokens: list[GbnfToken]) -> dict[str, str]:
    """The Lark name of each rule. Raises `InvalidRequest` for a duplicate rule."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    number = 0
    for at, (kind, name, line) in enumerate(tokens):
        if kind != "name" or not _is_rule(tokens, at):
            continue
        if name in names:
            raise _wrong(line, f"defines a rule a second time: {name}")
        base = lark = _lark_name(name)
        while lark in taken:  # each number is tried once, so that thousands of names that differ in dashes take no time
            number += 1
            lark = f"{base}_{number}"
        taken.add(lark)
        names[name] = lark
    return names


def _lark_name(name: str) -> str:
    """A lower-case name without dashes: Lark distinguishes rules (lower case) from terminals (upper case)."""
    if name == START:
        return "start"
    lower = name.replace("-", "_")
    # Prefixed, to avoid collisions with `start` and with names in capitals.
    return "r_" + "".join(f"_{char.lower()}" if char.isupper() else char for char in lower)
