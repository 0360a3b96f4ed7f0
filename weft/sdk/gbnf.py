"""Grammars in the notation `root ::= "a" item*` (GBNF), translated to the engine's dialect of Lark.

Only names and character classes differ: rule names become lower-case identifiers, classes become regular expressions,
and comments are dropped. Everything else (strings, groups, `|`, `*`, `+`, `?`, `{m,n}`) is written the same in both.
"""

from __future__ import annotations

from weft.sdk.errors import InvalidRequest

START = "root"
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def to_lark(rules: str) -> str:
    """The same grammar in Lark. Raises `InvalidRequest`, with the line, for what is none."""
    tokens = _scan(rules)
    names = [text for at, (kind, text, _) in enumerate(tokens) if kind == "name" and _is_rule(tokens, at)]
    if START not in names:
        raise InvalidRequest(f"the grammar has no rule {START}; write `{START} ::= ...`", "grammar")
    lines: list[list[str]] = []
    for at, (kind, text, line) in enumerate(tokens):
        if kind == "name" and _is_rule(tokens, at):
            lines.append([_lark_name(text), ":"])
        elif kind == "defines":
            continue
        elif not lines:
            raise InvalidRequest(f"line {line} of the grammar comes before any rule: {text}", "grammar")
        elif kind == "name":
            if text not in names:
                raise InvalidRequest(f"line {line} of the grammar names a rule that is none: {text}", "grammar")
            lines[-1].append(_lark_name(text))
        elif kind == "suffix":
            lines[-1][-1] += text
        else:
            lines[-1].append(text)
    return "\n".join(" ".join(line) for line in lines) + "\n"


Token = tuple[str, str, int]


def _scan(rules: str) -> list[Token]:
    """Pieces of the grammar: (kind, text, line)."""
    tokens: list[Token] = []
    at, line = 0, 1
    while at < len(rules):
        char = rules[at]
        if char == "\n":
            line += 1
            at += 1
        elif char.isspace():
            at += 1
        elif char == "#":
            end = rules.find("\n", at)
            at = len(rules) if end < 0 else end
        elif rules.startswith("::=", at):
            tokens.append(("defines", "::=", line))
            at += 3
        elif char in '"[':
            end = _closing(rules, at, line)
            text = rules[at:end]
            tokens.append(("item", text if char == '"' else "/" + text.replace("/", "\\/") + "/", line))
            at = end
        elif char in "*+?{":
            end = rules.find("}", at) + 1 if char == "{" else at + 1
            tokens.append(("suffix", rules[at : max(end, at + 1)], line))
            at = max(end, at + 1)
        elif char in "()|":
            tokens.append(("item", char, line))
            at += 1
        elif char in _NAME:
            end = at
            while end < len(rules) and rules[end] in _NAME:
                end += 1
            tokens.append(("name", rules[at:end], line))
            at = end
        else:
            raise InvalidRequest(f"line {line} of the grammar has a character that means nothing: {char}", "grammar")
    return tokens


def _closing(rules: str, start: int, line: int) -> int:
    """Where the string or class that begins at `start` ends."""
    last = '"' if rules[start] == '"' else "]"
    at = start + 1
    while at < len(rules) and rules[at] != "\n":
        if rules[at] == "\\":
            at += 1
        elif rules[at] == last:
            return at + 1
        at += 1
    raise InvalidRequest(f"line {line} of the grammar has a string or class without an end", "grammar")


def _is_rule(tokens: list[Token], at: int) -> bool:
    return at + 1 < len(tokens) and tokens[at + 1][0] == "defines"


def _lark_name(name: str) -> str:
    """Lark tells rules (lower case) from terminals (upper case); dashes it does not know."""
    if name == START:
        return "start"
    lower = name.replace("-", "_")
    # Prefixed, so that `start` and names in capitals collide with nothing.
    return "r_" + "".join(f"_{char.lower()}" if char.isupper() else char for char in lower)
