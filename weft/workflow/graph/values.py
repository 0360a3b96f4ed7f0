"""What nodes make of values: how a value becomes text, its parts and forms, and the ways of maps, switches and loops.

A value is JSON, or the answer of a model. These functions define the meaning of a graph for everything that evaluates
one; they call nothing and wait for nothing. Values are never changed in place.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from weft.workflow.graph.nodes import (
    GraphNode,
    LlmNode,
    LoopNode,
    MapNode,
    PickNode,
    SwitchNode,
    map_strings,
)
from weft.workflow.graph.regexes import compile_regex
from weft.workflow.graph.templates import Reference, parse_template

ValueOf = Callable[[Reference], Any]
"""The value that a reference means."""
PartRanges = Callable[[Sequence[int], Callable[[int], bool]], list[tuple[int, int]]]
"""The parts of a text by tokens, as `split_ranges` gives them of `ends` and `is_cut`."""
_ITEM = re.compile(r"-?[0-9]{1,9}")
MAX_VALUE_CHARS = 16 << 20
"""Of a value that templates and lists make of others."""
MAX_PARTS = 200_000
"""Of a text that is split."""
MAX_PARTS_TOKENS = 8 << 20
"""Of all parts of a text that is split by tokens."""
MAX_NESTING = 200
"""Lists and objects within others: deeper ones would exceed the stack of what reads them."""
TOO_DEEP = f"lists and objects stand in others {MAX_NESTING} deep at most"
MAX_SHOWN_CHARS = 60
"""Characters of a value that a message shows."""


class RowError(ValueError):
    """What a row's values make impossible. It ends the row, and no other. `node` is the id of the node that met the
    value, empty where that is not known."""

    def __init__(self, message: str, node: str = ""):
        super().__init__(f"{node}: {message}" if node else message)
        self.message = message
        self.node = node


class AnswerValue(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a model as a value: `value` everywhere but where a conversation goes on with it."""

    value: Any
    """The text; of a call with a schema the JSON that it is."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation that led to it and the answer, as messages of a chat completion."""
    tool_calls: tuple[Any, ...] | None = None
    """Of a call that offers tools."""


def plain(value: Any) -> Any:
    """A value as JSON, without conversations: what leaves the workflow, and what functions and programs get."""
    if isinstance(value, AnswerValue):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def is_too_deep(value: Any) -> bool:
    """Whether a value is nested more than `MAX_NESTING` deep. Takes long for a large one."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                inner += each.values()
            elif isinstance(each, (list, tuple)):
                inner += each
        if not inner:
            return False
        level = inner
    return True


def text_of(value: Any) -> str:
    """A value as text: a text as it is, others as compact JSON. Raises `RowError` for one that is not JSON."""
    value = plain(value)
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{_shown(value)} cannot be written as text: {error}") from None


def value_at(value: Any, reference: Reference) -> Any:
    """What a reference means, from the value of its name on; the value of a node with outputs has them by name. Raises
    `RowError` for a field that is not there."""
    for name in reference.path:
        value = _opened(value, name)
        if not isinstance(value, Mapping) or name not in value:
            raise RowError(f"{reference}: {_shown(value)} has no field {name!r}")
        value = value[name]
    return value


def fill(template: str, value_of: ValueOf) -> str:
    """A template's text, with each reference replaced by the text of its value. Raises `RowError` for one of more than
    `MAX_VALUE_CHARS`: a few nodes that double a text would fill any memory."""
    total = 0

    def filled(reference: Reference) -> str:
        nonlocal total
        found = text_of(value_of(reference))
        total = _within(total + len(found))
        return found

    return parse_template(template).fill(filled)


def list_of(values: Any, value_of: ValueOf) -> list[Any]:
    """The value of a list node. Raises `RowError` for one that is nested more than `MAX_NESTING` deep, or whose JSON
    has more than `MAX_VALUE_CHARS` or so: values stand in a list as they are, so one that is in it many times has no
    size of its own."""
    made = list(fill_values(values, value_of))
    _within(_Extents().of(made).num_chars)
    return made


def check_items(values: Sequence[Any]) -> None:
    """Raise `RowError` where what the items of a map gave is no list of `MAX_NESTING` at most: a loop around the map
    would nest any number. Lists and objects that are in it more than once may have `MAX_VALUE_CHARS` more than once:
    they could double with each round of a loop, and only where the value is written they take memory."""
    extents = _Extents()
    extents.of(values)
    _within(extents.repeated_chars)


class _Extent(NamedTuple):
    num_chars: int
    """Of the JSON, or so."""
    depth: int
    """Lists and objects within others, as `is_too_deep` counts them."""


class _Extents:
    """How large values are as JSON, and how deep. Each list or object is looked at once, however often it is there."""

    def __init__(self) -> None:
        self.repeated_chars = 0
        """Of lists and objects, each time that they were met again."""
        self._known: dict[int, _Extent] = {}

    def of(self, value: Any) -> _Extent:
        """The extent of a value. Raises `RowError` for one that is too deep."""
        try:
            return self._of(value)
        except RecursionError:
            raise RowError(TOO_DEEP) from None

    def _of(self, value: Any) -> _Extent:
        if isinstance(value, AnswerValue):
            value = value.value
        if isinstance(value, str):
            return _Extent(len(value) + 2, 0)
        if not isinstance(value, (list, tuple, Mapping)):
            return _Extent(1, 0)
        known = self._known.get(id(value))
        if known is not None:
            self.repeated_chars += known.num_chars
            return known
        num_chars, depth = 2, 0
        for item in itertools.chain(value, value.values()) if isinstance(value, Mapping) else value:
            inner = self._of(item)
            num_chars += inner.num_chars
            depth = max(depth, inner.depth + 1)
        if depth > MAX_NESTING:
            raise RowError(TOO_DEEP)
        made = self._known[id(value)] = _Extent(num_chars, depth)
        return made


def _within(num_chars: int) -> int:
    if num_chars > MAX_VALUE_CHARS:
        raise RowError(f"a value may have {MAX_VALUE_CHARS >> 20} Mi characters as text")
    return num_chars


def fill_values(values: Any, value_of: ValueOf) -> Any:
    """JSON whose strings are templates, filled. One that is a single reference becomes the value as it is. Raises
    `RowError` where the others come to more than `MAX_VALUE_CHARS`."""
    total = 0

    def filled(template: str) -> Any:
        nonlocal total
        alone = parse_template(template).alone
        if alone is not None:
            return value_of(alone)
        text = fill(template, value_of)
        total = _within(total + len(text))
        return text

    return map_strings(values, filled)


def chat_messages(node: LlmNode, value_of: ValueOf) -> tuple[Mapping[str, Any], ...]:
    """The messages of a call, a conversation that it goes on with first; empty for a call with a prompt. Raises
    `RowError` where there is no conversation to go on with, and for texts of more than `MAX_VALUE_CHARS` together."""
    total = 0
    found: list[Mapping[str, Any]] = []
    for message in node.messages or ():
        if message.chat is not None:
            assert node.continued is not None
            before = value_of(node.continued)
            if not isinstance(before, AnswerValue):
                raise RowError(f"{message.chat} is {_shown(before)}, not the answer of a model", node.id)
            found += before.messages
        else:
            filled = msgspec.to_builtins(message)
            content = fill(message.content or "", value_of)
            total = _within(total + len(content))
            found.append({**filled, "content": content})
    return tuple(found)


def answer_content(node: LlmNode, text: str) -> Any:
    """The value of an answer with this text. Raises `RowError` where the call has a schema and the text is no JSON."""
    return text if node.schema is None else _parsed(node, text)


def pick(node: PickNode, value: Any) -> Any:
    """The part or form of a value that a node takes. Raises `RowError` for a value that has none."""
    if node.field is not None:
        return _field(node, node.field, value)
    value = _content(value)  # items of a list keep their conversations
    if node.slice is not None:
        if not isinstance(value, (str, list, tuple)):
            raise _refused(node, "a slice of a text or a list", value)
        if node.max_items is not None and not isinstance(value, str):
            _check_length(node, value, node.max_items)
        return value[slice(*node.slice)]
    if not isinstance(value, str):
        raise _refused(node, "a text", value)
    if node.split is not None:
        if value.count(node.split) >= MAX_PARTS:
            raise RowError(f"a text may be split into {MAX_PARTS:,} parts", node.id)
        return value.split(node.split)
    if node.matches is not None:
        return compile_regex(node.matches).search(value) is not None
    return value.strip() if node.regex is None else _first_match(node, node.regex, value)


def join(values: Any, separator: Any, node: GraphNode) -> str:
    """The built-in function `join`. Raises `RowError` for a value that is not a list."""
    values = _content(values)
    if not isinstance(values, (list, tuple)):
        raise _refused(node, "a list", values)
    between, total = text_of(separator), 0
    texts = []
    for value in values:
        texts.append(text_of(value))
        total = _within(total + len(texts[-1]) + len(between))
    return between.join(texts)


def split_ranges(
    args: Mapping[str, Any], ends: Sequence[int], node: GraphNode, is_cut: Callable[[int], bool] = lambda at: True
) -> list[tuple[int, int]]:
    """The built-in function `split`: where each part of a text is, from and to (exclusive). `ends` are the places in
    which its tokens end, behind 0; parts begin and end only where `is_cut` says that a character does. No part is
    empty, and one has more than `max_tokens` tokens only where a single character has; one that is in two parts in
    part counts in both. A text without tokens has no parts. Raises `RowError` for sizes that are none."""
    size, overlap = args["max_tokens"], args.get("overlap_tokens", 0)
    for name, number, least in (("max_tokens", size, 1), ("overlap_tokens", overlap, 0)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise RowError(f"{name} is {_shown(number)}, not an integer of {least} or more", node.id)
    if overlap >= size:
        raise RowError(f"overlap_tokens is {overlap:,}, which leaves nothing of max_tokens, {size:,}", node.id)
    num_tokens, parts, total, start, end = len(ends) - 1, list[tuple[int, int]](), 0, 0, 0
    while end < ends[-1]:
        while (following := _part_end(start, ends, size, is_cut)) <= end:
            # The overlap and the next character are too much together.
            start = next(at for at in range(start + 1, end + 1) if is_cut(at))
        parts.append((start, following))
        end, total = following, total + min(size, num_tokens)
        if len(parts) > MAX_PARTS or total > MAX_PARTS_TOKENS:
            raise RowError(
                f"a text may be split into {MAX_PARTS:,} parts, of {MAX_PARTS_TOKENS:,} tokens together", node.id
            )
        # The end is in the last token of the part: what the next part repeats begins so many tokens before its end.
        repeated = ends[max(bisect.bisect_left(ends, end) - overlap, 0)]
        start = next(at for at in range(min(repeated, end), end + 1) if is_cut(at))
    return parts


def _part_end(start: int, ends: Sequence[int], size: int, is_cut: Callable[[int], bool]) -> int:
    """Where the longest part of `size` tokens ends that begins here; one character is a part in any case."""
    first = bisect.bisect_right(ends, start) - 1
    last = ends[min(first + size, len(ends) - 1)]
    shorter = (at for at in range(last, start, -1) if is_cut(at))
    longer = (at for at in range(last, ends[-1] + 1) if is_cut(at))
    return next(itertools.chain(shorter, longer))


def items_of(node: MapNode, value: Any) -> list[Any]:
    """The items of a map. Raises `RowError` for a value that is not a list, or a list that is too long."""
    value = _content(value)
    if not isinstance(value, (list, tuple)):
        raise _refused(node, "a list", value)
    _check_length(node, value, node.max_items)
    return list(value)


def case_of(node: SwitchNode, value: Any) -> str:
    """The place of the body that a switch takes, as `GraphNode.bodies` names it. Raises `RowError` for a value that
    has no case where there is no default."""
    value = _content(value)
    if isinstance(value, (Mapping, list, tuple)):
        raise _refused(node, "a text, a number or a boolean", value)
    case = text_of(value)
    if case in node.cases:
        return f"cases[{case}]"
    if node.default is None:
        raise RowError(f"there is no case for {_shown(value)} and no default", node.id)
    return "default"


def is_last_round(node: LoopNode, number: int, until: Any) -> bool:
    """Whether round `number` (1: the first) was the last one, given the value of `until`, which is not looked at where
    the loop has none. Raises `RowError` at the limit of a loop that fails there, and for what is not true or false."""
    until = _content(until)
    if node.until is not None and not isinstance(until, bool):
        raise RowError(f"{node.until} is {_shown(until)}; it must be true or false", node.id)
    if number < node.max_rounds:
        return node.until is not None and until is True
    if node.until is not None and until is False and node.at_limit == "fail":
        raise RowError(f"{node.until} was not true after {number} rounds, and max_rounds is {node.max_rounds}", node.id)
    return True


def _field(node: PickNode, name: str, value: Any) -> Any:
    value = _opened(value, name)
    if isinstance(value, str):
        value = _parsed(node, value)
    if isinstance(value, Mapping) and name in value:
        return value[name]
    if isinstance(value, (list, tuple)) and _ITEM.fullmatch(name) and -len(value) <= int(name) < len(value):
        return value[int(name)]
    raise RowError(f"{_shown(value)} has no field {name!r}", node.id)


def _check_length(node: GraphNode, items: Sequence[Any], max_items: int) -> None:
    if len(items) > max_items:
        raise RowError(f"the list has {len(items):,} items, and max_items is {max_items:,}", node.id)


def _content(value: Any) -> Any:
    return value.value if isinstance(value, AnswerValue) else value


def _opened(value: Any, name: str) -> Any:
    """What has the field: calls of tools stand beside the value of an answer."""
    if isinstance(value, AnswerValue) and value.tool_calls is not None and name == "tool_calls":
        return {name: list(value.tool_calls)}
    return _content(value)


def _parsed(node: GraphNode, text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{_shown(text)} is not JSON: {error}", node.id) from None
    if isinstance(value, (dict, list)) and is_too_deep(value):
        raise RowError(TOO_DEEP, node.id)
    return value


def _first_match(node: PickNode, pattern: str, text: str) -> str:
    compiled = compile_regex(pattern)
    found = compiled.search(text)
    part = None if found is None else found[1 if compiled.groups else 0]
    if part is None:
        raise RowError(f"{pattern!r} is not found in {_shown(text)}", node.id)
    assert isinstance(part, str)
    return part


def _refused(node: GraphNode, takes: str, value: Any) -> RowError:
    return RowError(f"takes {takes}, and this is {_shown(value)}", node.id)


def _shown(value: Any) -> str:
    """A value in a message, with what it is."""
    kinds: list[tuple[Any, str]] = [
        (str, "the text"),
        (bool, "the value"),
        ((int, float), "the number"),
        (Mapping, "the object"),
        ((list, tuple), "the list"),
    ]
    kind = next((name for types, name in kinds if isinstance(value, types)), "the value")
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > MAX_SHOWN_CHARS:
            return f"{kind} {text[:MAX_SHOWN_CHARS]}…"
    return f"{kind} {text}"


def _pieces(value: Any) -> Iterator[str]:
    """The `repr` of a plain value, piece by piece: of a large one only what is shown is written."""
    value = _content(value)
    if isinstance(value, Mapping):
        yield "{"
        for number, (key, inner) in enumerate(value.items()):
            yield f"{', ' if number else ''}{key[: MAX_SHOWN_CHARS + 1]!r}: "
            yield from _pieces(inner)
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "["
        for number, inner in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(inner)
        yield "]"
    else:
        yield repr(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value)
