"""Examples (a conversation with gold answers) and the checks that judge an answer."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from training.weft_tiny.grammar import TOP

Message = dict[str, Any]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Check:
    """What an assistant turn must satisfy; every field that is set must hold."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    starts: str = ""
    ends: str = ""
    sentences: int = 0
    unrepeated: bool = False
    exact: str | None = None
    record: dict[str, Any] | None = None
    call: tuple[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class Example:
    """A conversation whose assistant turns are gold answers, with one check for each of them."""

    kind: str
    messages: list[Message]
    checks: list[Check]
    tools: list[dict[str, Any]] = field(default_factory=list)
    level: int = TOP


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """An assistant message of text."""
    return {"role": "assistant", "content": content}


def calling(name: str, arguments: dict[str, Any]) -> Message:
    """An assistant message that is one tool call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def mentions(text: str, value: str) -> bool:
    """Whether the value occurs in the text as whole words (numbers not inside longer numbers)."""
    if value.lower() not in text.lower():  # compiling a pattern for each value takes long
        return False
    return re.search(rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)", text, re.IGNORECASE) is not None


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, split after ``.``, ``!`` or ``?`` and a space."""
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]


def parse_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """The name and arguments of a text that is exactly one well-formed tool call."""
    match = _CALL.fullmatch(text.strip())
    if match is None:
        return None
    try:
        call = json.loads(match[1])
    except ValueError:
        return None
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return None
    return call["name"], call["arguments"]


def calculate(expression: str) -> float:
    """The value of an expression of numbers, ``+ - * /`` and parentheses."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError(f"not arithmetic: {expression!r}")

    return value(ast.parse(expression, mode="eval").body)


def passes(check: Check, answer: str) -> bool:
    """Whether an answer satisfies the check."""
    if check.call is not None:
        return parse_call(answer) == check.call
    if check.record is not None:
        try:
            found = json.loads(answer)
        except ValueError:
            return False
        return bool(found == check.record)
    if check.exact is not None and answer.strip() != check.exact:
        return False
    sentences = split_sentences(answer)
    return (
        all(mentions(answer, value) for value in check.include)
        and not any(mentions(answer, value) for value in check.exclude)
        and (not check.any_of or any(value.lower() in answer.lower() for value in check.any_of))
        and answer.startswith(check.starts)
        and answer.rstrip().endswith(check.ends)
        and (not check.sentences or len(sentences) == check.sentences)
        and (not check.unrepeated or len(set(sentences)) == len(sentences))
        and bool(answer.strip())
    )
