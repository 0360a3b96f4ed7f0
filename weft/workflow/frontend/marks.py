r"""Marks: how a variable stands in a text while the function of a flow runs, until the text becomes a template.

Templates write a value as `{{name}}`, and a backslash before it makes it text. A text of the user's may end with a
backslash before a variable, so a variable is written as `{{:name:}}`, which is no reference of a template: `templated`
makes a reference of it, and keeps what stands before it. The `repr` of a variable has a mark of its own, because
`f"{q!r}"` and `f"{[q]}"` put it into a text in place of the value. Marks are ASCII, so that `json.dumps` keeps them.
"""

from __future__ import annotations

import re
from typing import get_args

from weft.workflow.graph.templates import NAME, Reference
from weft.workflow.graph.value_types import Kind

_PATH = rf"({NAME}(?:\.{NAME})*)"
_VALUE = re.compile(rf"\{{\{{:{_PATH}:\}}\}}")
"""Without the backslashes before it: a pattern that begins with any number of them takes the square of that number."""
_REPR = re.compile(rf"variable :{_PATH}: (?:{'|'.join(get_args(Kind))})\b")
_METHOD = re.compile(r"Variable\.(\w+) of ")
"""In the `repr` of a method, and of the conversation that a variable has."""


class NeedsValueError(TypeError):
    """Python asked for the value of a variable while a flow is traced. The message names the operator to use."""


def value_mark(reference: Reference) -> str:
    """The text that stands for a value."""
    return f"{{{{:{reference}:}}}}"


def repr_mark(reference: Reference, kind: Kind) -> str:
    """The `repr` of a variable, which no template may have."""
    return f"<variable :{reference}: {kind}>"


def has_mark(text: str) -> bool:
    """Whether a variable, or the `repr` of one, stands in a text."""
    return marked_in(text) is not None


def marked_in(text: str) -> str | None:
    """The first variable of a text, its `repr` included; None: there is none."""
    found = _VALUE.search(text) or _REPR.search(text)
    return None if found is None else found[1]


def templated(text: str) -> str:
    """The template of a text: marks become references, and backslashes before them stay. Other references, and what
    the user escaped, are left. Raises `NeedsValueError` for the `repr` of a variable."""
    shown = _REPR.search(text)
    if shown is not None:
        method = _METHOD.search(text)
        raise NeedsValueError(
            f"the text has the repr of the variable {shown[1]}, not its value: write the variable alone in braces, a "
            "list as ops.join(values), one of several outputs by its name, and a field that is called like a method as "
            f"value[{'name' if method is None else method[1]!r}]"
        )
    parts: list[str] = []
    done = 0
    for found in _VALUE.finditer(text):
        before = text[done : found.start()]
        ending = len(before) - len(before.rstrip("\\"))
        parts += [before, "\\" * ending, f"{{{{{found[1]}}}}}"]
        done = found.end()
    return "".join([*parts, text[done:]])
