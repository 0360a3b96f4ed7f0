"""Rendering conversations with the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


@cache
def compiled(source: str = TEMPLATE) -> Template:
    """A chat template compiled the way chat libraries do it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def render(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, generate: bool = False
) -> str:
    """The text of a conversation; with ``generate``, up to the start of the assistant's turn."""
    return compiled().render(messages=list(messages), tools=list(tools or ()), add_generation_prompt=generate)
