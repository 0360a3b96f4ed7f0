r"""Marks: how a variable stands in a text while the function of a flow runs, until the text becomes a template.

Templates write a value as `{{name}}`, and a backslash before it makes it text. A text of the user's may end with a
backslash before a variable, so a mark is no reference of a template: `templated` makes a reference of it, and keeps
what stands before it.

A mark is made of noncharacters of Unicode, which no text has, between letters whose case alternates. So a piece of a
mark is told from text wherever a method of `str` cuts it, and so is a mark whose case was changed. `json.dumps` and
`repr` escape noncharacters: an escaped mark is one too. The `repr` of a variable has a mark of its own, because
`f"{q!r}"` and `f"{[q]}"` put it into a text in place of the value.
"""

from __future__ import annotations

import re
from typing import get_args

from weft.workflow.graph.templates import NAME, Reference, parse_reference
from weft.workflow.graph.value_types import Kind

_FIRST_DIGIT = 0xFDD8
"""The noncharacter of the hexadecimal digit 0; names stand in marks as digits. Ranges of source code name the first
and the last noncharacter, U+FDD0 and U+FDEF, which no mark has."""
_OPEN, _CLOSE = chr(_FIRST_DIGIT + 16), chr(_FIRST_DIGIT + 17)
_LETTERS = "wEfTmArK"
"""Changed by every change of case, and left by what removes all but ASCII."""
_DIGIT = f"[{chr(_FIRST_DIGIT)}-{chr(_FIRST_DIGIT + 15)}]"
_ESCAPED_DIGIT = r"(?P=slashes)u(?i:fd(?:d[89a-f]|e[0-7]))"
_ESCAPED_OPEN, _ESCAPED_CLOSE = r"(?P=slashes)u(?i:fde8)", r"(?P=slashes)u(?i:fde9)"
_VALUE = re.compile(
    rf"{_OPEN}{_OPEN.join(_LETTERS)}(?P<digits>(?:{_DIGIT}{{2}})+){_CLOSE}"
    rf"|(?P<slashes>\\{{1,8}})u(?i:fde8){_ESCAPED_OPEN.join(_LETTERS)}"
    rf"(?P<escapes>(?:{_ESCAPED_DIGIT}){{2,}}){_ESCAPED_CLOSE}"
)
"""As it is, or escaped once or several times. Without the backslashes before it: a pattern that begins with any number
of them takes the square of that number."""
_PIECE = re.compile(rf"[{chr(_FIRST_DIGIT)}-{_CLOSE}]|\\[uU](?i:fd(?:d[89a-f]|e[0-9]))|{_LETTERS}")
_PATH = rf"({NAME}(?:\.{NAME})*)"
_REPR = re.compile(rf"variable :{_PATH}: (?:{'|'.join(get_args(Kind))})\b")
_METHOD = re.compile(r"Variable\.(\w+) of ")
"""In the `repr` of a method, and of the conversation that a variable has."""


class NeedsValueError(TypeError):
    """Python asked for the value of a variable while a flow is traced. The message names the operator to use."""


def value_mark(reference: Reference) -> str:
    """The text that stands for a value."""
    digits = "".join(chr(_FIRST_DIGIT + int(digit, 16)) for digit in str(reference).encode().hex())
    return f"{_OPEN}{_OPEN.join(_LETTERS)}{digits}{_CLOSE}"


def repr_mark(reference: Reference, kind: Kind) -> str:
    """The `repr` of a variable, which no template may have."""
    return f"<variable :{reference}: {kind}>"


def has_mark(text: str) -> bool:
    """Whether a variable, the `repr` of one, or a piece of a mark stands in a text."""
    return _PIECE.search(text) is not None or _REPR.search(text) is not None


def marked_in(text: str) -> str:
    """The first variable of a text that has a mark, its `repr` included. Raises `NeedsValueError` for a text with a
    mark that is not whole."""
    names = [name for _, name in _cut(text) if name]
    found = _REPR.search(text)
    return names[0] if names or found is None else found[1]


def readable(text: str) -> str:
    """A text for people: variables in braces, and no pieces of marks."""
    return _PIECE.sub("", _VALUE.sub(lambda found: f"{{{_name(found)}}}", text))


def templated(text: str) -> str:
    """The template of a text: marks become references, and backslashes before them stay. Other references, and what
    the user escaped, are left. Raises `NeedsValueError` for the `repr` of a variable and for a mark that is not
    whole."""
    shown = _REPR.search(text)
    if shown is not None:
        method = _METHOD.search(text)
        raise NeedsValueError(
            f"the text has the repr of the variable {shown[1]}, not its value: write the variable alone in braces, a "
            "list as ops.join(values), one of several outputs by its name, and a field that is called like a method as "
            f"value[{'name' if method is None else method[1]!r}]"
        )
    parts: list[str] = []
    for before, name in _cut(text):
        parts.append(before)
        if name:
            parts += ["\\" * (len(before) - len(before.rstrip("\\"))), f"{{{{{name}}}}}"]
    return "".join(parts)


def _cut(text: str) -> list[tuple[str, str]]:
    """The texts before the marks, with the names in these; the last text has none. Raises `NeedsValueError` for a mark
    that is not whole."""
    parts: list[tuple[str, str]] = []
    done = 0
    for found in _VALUE.finditer(text):
        parts.append((text[done : found.start()], _name(found)))
        done = found.end()
    parts.append((text[done:], ""))
    if any(_PIECE.search(before) for before, _ in parts) or any(not name for _, name in parts[:-1]):
        raise NeedsValueError(
            "a method of str changed or cut the f-string where a variable stands, and it sees a mark there, not the "
            "value: use value[:20], value.strip() or value.split(separator) of the variable itself, before it is put "
            "into the text, or ops.function(f, value) for anything else"
        )
    return parts


def _name(found: re.Match[str]) -> str:
    """What a mark stands for; empty: it was put together from pieces."""
    digits = found["digits"] or re.sub(r"\\+u(....)", lambda escape: chr(int(escape[1], 16)), found["escapes"])
    name = bytes(
        (ord(high) - _FIRST_DIGIT) * 16 + ord(low) - _FIRST_DIGIT
        for high, low in zip(digits[::2], digits[1::2], strict=False)
    ).decode("ascii", "replace")
    return name if parse_reference(name) is not None else ""
