r"""Text with references to values: `"Answer {{question}}"`. The only template syntax of workflows.

A reference is a name, and the fields or outputs that lead on from it: `verdict.winner`. In a text it stands between
`{{` and `}}`; braces around anything else are text. A backslash before the braces makes the whole text again, and two
backslashes are one: `\{{name}}` is the text `{{name}}`, `\\{{name}}` a backslash and a value.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
REFERENCE = rf"{NAME}(?:\.{NAME})*"
MAX_NAME_CHARS = 64
_NAME = re.compile(NAME)
_REFERENCE = re.compile(REFERENCE)
_PLACEHOLDER = re.compile(rf"\{{\{{[ \t]*({REFERENCE})[ \t]*\}}\}}")
"""Without the backslashes before it: a pattern that begins with any number of them takes the square of that number."""
MAX_KEPT_CHARS = 16_384
"""Longer templates are parsed each time, so that what is kept has bounded memory."""


class Reference(NamedTuple):
    """A value that something else makes."""

    name: str
    """A node, an input, or what the surrounding body binds."""
    path: tuple[str, ...] = ()
    """From the value of `name` on: the output of a node that has several, then fields."""

    def __str__(self) -> str:
        return ".".join((self.name, *self.path))


class Template(NamedTuple):
    """Text and references in order. No two texts are neighbours, and none is empty."""

    parts: tuple[str | Reference, ...]

    @property
    def references(self) -> tuple[Reference, ...]:
        """The references, in order, repeated ones too."""
        return tuple(part for part in self.parts if isinstance(part, Reference))

    @property
    def alone(self) -> Reference | None:
        """The reference that this template consists of; None where there is text or a second one. Where a place takes
        more than text, such a template passes the value on as it is."""
        return self.parts[0] if len(self.parts) == 1 and isinstance(self.parts[0], Reference) else None

    def __str__(self) -> str:
        """The text that parses to this template."""
        text = ""
        for part in self.parts:
            if isinstance(part, Reference):
                # Backslashes that end a text would belong to the braces.
                ending = len(text) - len(text.rstrip("\\"))
                text += "\\" * ending + f"{{{{{part}}}}}"
            else:
                text += escape(part)
        return text

    def fill(self, text_of: Callable[[Reference], str]) -> str:
        """The text with each reference replaced."""
        return "".join(part if isinstance(part, str) else text_of(part) for part in self.parts)


def is_name(text: str) -> bool:
    """Whether nodes, inputs and outputs can have this name."""
    return len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None


def parse_reference(text: str) -> Reference | None:
    """The reference that is written so outside a text, such as `verdict.winner`; None if it is none."""
    if _REFERENCE.fullmatch(text) is None:
        return None
    name, *path = text.split(".")
    return Reference(name, tuple(path))


def parse_template(text: str) -> Template:
    """Find the references of a text. Every text is a template."""
    return _parsed(text) if len(text) <= MAX_KEPT_CHARS else _parse(text)


def _parse(text: str) -> Template:
    parts: list[str | Reference] = []
    done = 0
    for found in _PLACEHOLDER.finditer(text):
        before = text[done : found.start()]
        kept = before.rstrip("\\")
        num_slashes = len(before) - len(kept)
        parts.append(kept + "\\" * (num_slashes // 2))
        done = found.end()
        if num_slashes % 2:
            parts.append(found[0])
        else:
            name, *path = found[1].split(".")
            parts.append(Reference(name, tuple(path)))
    return join_parts([*parts, text[done:]])


_parsed = functools.lru_cache(4096)(_parse)


def join_parts(parts: Iterable[str | Reference]) -> Template:
    """The template of these parts. Texts that stand side by side become one, and empty ones are left out."""
    joined: list[str | Reference] = []
    for _, group in itertools.groupby(parts, lambda part: isinstance(part, str)):
        alike = list(group)
        joined += filter(None, ["".join(map(str, alike))]) if isinstance(alike[0], str) else alike
    return Template(tuple(joined))


def escape(text: str) -> str:
    """The template whose value is this text, with its braces."""
    made, done = [], 0
    for found in _PLACEHOLDER.finditer(text):
        before = text[done : found.start()]
        made += [before, "\\" * (len(before) - len(before.rstrip("\\")) + 1), found[0]]
        done = found.end()
    return "".join([*made, text[done:]])
