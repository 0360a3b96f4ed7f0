"""The model calls of one row as a flat list: bodies entered, loops unrolled, and prompts with marks for values.

An **operator** is an LLM node, once for each expected round of the loops around it. Texts, lists and joins of known
items are written into the prompts that use them; any other value is a placeholder.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from weft.workflow.analysis.prompts import MAX_MARKS, Template, TokensOf, mark, marks_of, template_of, without_marks
from weft.workflow.analysis.statistics import Statistics
from weft.workflow.graph.builtin_functions import JOIN_SEPARATOR
from weft.workflow.graph.labels import label_prefix
from weft.workflow.graph.nodes import (
    AnyNode,
    Body,
    DataNode,
    FunctionNode,
    GraphNode,
    ListNode,
    LlmNode,
    LoopNode,
    MapNode,
    PickNode,
    SwitchNode,
    TextNode,
    WorkflowGraph,
    reference_of,
    uses,
)
from weft.workflow.graph.templates import Reference, parse_template
from weft.workflow.graph.values import RowError, ValueOf, fill, items_of, list_of, pick, text_of, value_at

MAX_UNROLLED = 8
"""Rounds of a loop that are planned one by one; the last stands for those after it."""


MAX_OPERATORS = 500
"""Of a plan. Its time grows with their square: it is about a second of one core for so many."""


MAX_TEMPLATE_CHARS = 64 << 20
"""Of all texts of a plan, each with the texts that it is made of: a few nodes that double a text have any number."""


class TooLarge(ValueError):
    """A workflow has more operators, or longer texts, than plans may have."""


class Placeholder(NamedTuple):
    """A value to come, within prompts."""

    name: str
    """The input, or the path of the node, that makes it."""
    tokens: int | None
    """Expected; None: an input's, which rows have."""
    operator: int | None = None
    """The operator whose answer it is, unchanged."""
    lists: tuple[tuple[str, ...], ...] | None = None
    """[rows] of the item of a map whose lists are known before the run: the items as texts."""


class Operator(NamedTuple):
    """An LLM node, in one round of the loops around it."""

    node: str
    """Its label (`weft.workflow.graph.labels`)."""
    rounds: tuple[int, ...]
    """Of the loops around it, the outermost first, from 0; the last that is planned stands for those after it."""
    template: Template
    output_tokens: int
    needs: tuple[int, ...]
    """The operators whose answers it depends on, other nodes between."""
    calls: float
    """Expected, per row."""
    items: int
    """Calls of a row that are planned as one, next to each other: those for the items of the maps around it."""
    shared_by_items: int
    """Elements of the template that are the same for all items."""
    model: str
    continues: int | None
    """The operator whose conversation it goes on with."""
    salt: str | None = None
    """Its `cache_salt`: calls with another one find none of its KV."""
    sure: tuple[bool, ...] = ()
    """[rows] whether it is surely called, unless a row fails."""
    weights: tuple[float, ...] | None = None
    """[rows] calls of a row over `calls`, where the lists of maps around are known; None: all rows have as many."""


class Unrolled(NamedTuple):
    """The operators of a workflow, each after those that it needs, and the placeholders of their templates."""

    operators: tuple[Operator, ...]
    placeholders: tuple[Placeholder, ...]
    goals: tuple[tuple[str, frozenset[int]], ...]
    """(output, the operators that it is made from directly), by name."""


class _Value(NamedTuple):
    """What a name stands for."""

    text: str
    """With marks."""
    needs: frozenset[int] = frozenset()
    items: tuple[_Value, ...] | None = None
    """Of a list whose items are known."""
    length: float | None = None
    """Expected items of another list."""
    outputs: Mapping[str, _Value] | None = None
    """Of a node with bodies."""
    operator: int | None = None
    column: Callable[[], Sequence[Any]] | None = None
    """Of a value that is known before the run: what it is in each row, a `RowError` where there is none."""
    lists: tuple[tuple[Any, ...], ...] | None = None
    """Of an item: [rows] those of the map's list."""


class _Around(NamedTuple):
    """Where a body stands."""

    prefix: str
    """Of the labels of its nodes."""
    scope: Mapping[str, _Value]
    calls: float
    items: int
    first_of_item: int
    """The first placeholder that is made for each item of a map around; all after it are too."""
    rounds: tuple[int, ...]
    after: frozenset[int]
    """The operators that a body waits for before any of its nodes is evaluated."""
    sure: tuple[bool, ...]
    """[rows] whether the body is surely evaluated."""
    weights: tuple[float, ...] | None = None
    """[rows] as of `Operator`."""


def unroll(
    graph: WorkflowGraph,
    tokens: TokensOf,
    statistics: Statistics,
    model: str,
    rows: Sequence[Mapping[str, Any]] | int = 1,
) -> Unrolled:
    """The operators of a canonical graph. `model` is that of nodes that name none; `rows` are those of the run, or how
    many there are. Raises the errors of `tokens`, and `TooLarge`."""
    return _Unroll(tokens, statistics, model, rows).graph(graph)


class _Unroll:
    def __init__(self, tokens: TokensOf, statistics: Statistics, model: str, rows: Sequence[Mapping[str, Any]] | int):
        self._tokens = tokens
        self._statistics = statistics
        self._model = model
        self._rows = None if isinstance(rows, int) else rows
        self._num_rows = rows if isinstance(rows, int) else len(rows)
        self._template_chars = 0
        self._operators: list[Operator] = []
        self._placeholders: list[Placeholder] = []
        self._fields: dict[tuple[str, tuple[str, ...]], str] = {}
        """By text of an object and path in it: the text of the field."""
        self._chats: list[tuple[dict[str, Any], ...]] = []
        """By operator: its messages with marks, and the answer."""

    def graph(self, graph: WorkflowGraph) -> Unrolled:
        scope = {name: self._input(name) for name in graph.inputs}
        around = _Around("", scope, 1.0, 1, MAX_MARKS, (), frozenset(), (True,) * self._num_rows)
        values = self._body(Body(nodes=graph.nodes, outputs=graph.outputs), around)
        outputs = tuple(
            (name, self._follow(values, reference_of(graph.outputs[name])).needs) for name in sorted(graph.outputs)
        )
        return Unrolled(tuple(self._operators), tuple(self._placeholders), outputs)

    def _input(self, name: str) -> _Value:
        rows = self._rows
        column = None if rows is None else lambda: [row[name] for row in rows]
        return _Value(self._new(Placeholder(name, None)), column=column)

    def _new(self, placeholder: Placeholder) -> str:
        self._placeholders.append(placeholder)
        return mark(len(self._placeholders) - 1)

    def _body(self, body: Body, around: _Around) -> dict[str, _Value]:
        scope = dict(around.scope)
        for node in body.nodes:
            value = self._node(node, around._replace(scope=scope))
            scope[node.id] = value._replace(column=self._column(node, dict(scope)))
        return scope

    def _column(self, node: AnyNode, scope: Mapping[str, _Value]) -> Callable[[], Sequence[Any]] | None:
        """What a node makes of values that are known before the run."""
        match node:
            case DataNode():
                made: Callable[[ValueOf], Any] = lambda value_of: node.value  # noqa: E731
            case TextNode():
                made = lambda value_of: fill(node.template, value_of)  # noqa: E731
            case ListNode():
                made = lambda value_of: list_of(node.of, value_of)  # noqa: E731
            case PickNode():
                made = lambda value_of: pick(node, value_of(reference_of(node.of)))  # noqa: E731
            case _:
                return None
        sources = {use.reference.name: scope[use.reference.name].column for use in uses(node)}
        return None if None in sources.values() else functools.cache(lambda: self._rows_of(made, sources))

    def _rows_of(
        self, made: Callable[[ValueOf], Any], sources: Mapping[str, Callable[[], Sequence[Any]] | None]
    ) -> list[Any]:
        """[rows] what is made of the values of a row, or the `RowError`."""
        columns = {name: column() for name, column in sources.items() if column is not None}

        def in_row(row: int) -> Any:
            def value_of(reference: Reference) -> Any:
                value = columns[reference.name][row]
                if isinstance(value, RowError):
                    raise value
                return value_at(value, reference)

            try:
                return made(value_of)
            except RowError as error:
                return error

        return [in_row(row) for row in range(self._num_rows)]

    def _lists(self, node: MapNode, scope: Mapping[str, _Value]) -> tuple[tuple[Any, ...], ...] | None:
        """[rows] the items of a map, where they are known before the run; none in a row that fails there."""
        over = reference_of(node.over)
        column = scope[over.name].column
        if column is None:
            return None
        found = self._rows_of(lambda value_of: items_of(node, value_of(over)), {over.name: column})
        return tuple(() if isinstance(items, RowError) else tuple(items) for items in found)

    def _node(self, node: AnyNode, around: _Around) -> _Value:
        scope = around.scope
        path = around.prefix + node.id
        match node:
            case LlmNode():
                return self._call(node, path, around)
            case TextNode():
                return _Value(*self._fill(node.template, scope))
            case DataNode(value=str(text)):
                return _Value(without_marks(text))
            case DataNode(value=list(items)):
                return _list(tuple(_Value(_as_text(item)) for item in items))
            case ListNode():
                return _list(tuple(self._value(item, scope) for item in node.of))
            case FunctionNode(name="join"):
                return self._join(node, path, scope)
            case PickNode():
                source = self._follow(scope, reference_of(node.of))
                lists = _of_items(source.lists, functools.partial(pick, node))
                if lists is None:
                    return self._opaque(node, path, around, self._expected(source.text), source)
                return self._item(Placeholder(path, None), source.needs, lists)
            case MapNode():
                return self._map(node, path, around)
            case SwitchNode():
                return self._switch(node, path, around)
            case LoopNode():
                return self._loop(node, path, around)
            case _:
                return self._opaque(node, path, around)

    def _opaque(
        self, node: GraphNode, path: str, around: _Around, tokens: int | None = None, source: _Value | None = None
    ) -> _Value:
        """A value of which only the length is guessed."""
        needs = frozenset[int]().union(*(self._follow(around.scope, use.reference).needs for use in uses(node)))
        text = self._new(Placeholder(path, self._tokens_of(path, tokens)))
        return _Value(text, needs, length=None if source is None else source.length)

    def _expected(self, text: str) -> int | None:
        """Tokens of the values in a text, if none is an input."""
        lengths = [self._placeholders[number].tokens for number in marks_of(text)]
        return None if None in lengths or not lengths else sum(length for length in lengths if length is not None)

    def _tokens_of(self, path: str, derived: int | None) -> int:
        """Of a value: as known, else as derived from what it is made of, else by default."""
        return self._statistics.value_tokens(path) if derived is None else self._statistics.value_tokens(path, derived)

    def _join(self, node: FunctionNode, path: str, scope: Mapping[str, _Value]) -> _Value:
        source = self._value(node.args.get("of"), scope)
        separator = self._value(node.args.get("separator", JOIN_SEPARATOR), scope)
        needs = source.needs | separator.needs
        if source.items is not None:
            return _Value(separator.text.join(item.text for item in source.items), needs)
        return _Value(self._new(Placeholder(path, self._tokens_of(path, self._expected(source.text)))), needs)

    def _call(self, node: LlmNode, path: str, around: _Around) -> _Value:
        needs: frozenset[int] = frozenset()
        continues = None
        model = str(node.request.get("model") or self._model)
        tokens = self._tokens(model)
        messages: list[dict[str, Any]] = []
        if node.continued is not None:
            source = self._follow(around.scope, node.continued)
            needs, continues = source.needs, source.operator
            messages += [] if continues is None else self._chats[continues]
        for message in node.messages or ():
            if message.role is not None:
                text, more = self._fill(message.content or "", around.scope)
                needs |= more
                named = {"name": message.name, "tool_call_id": message.tool_call_id}
                kept = {field: value for field, value in named.items() if value is not None}
                messages.append({"role": message.role, "content": text, **kept})
        if node.prompt is not None:
            text, needs = self._fill(node.prompt, around.scope)
        else:
            text = tokens.chat(messages, node.request)
        number = len(self._operators)
        if number == MAX_OPERATORS:
            raise TooLarge(f"the workflow has more than {MAX_OPERATORS} calls of models a row, rounds of loops counted")
        template = template_of(text, tokens)
        output_tokens = self._statistics.output_tokens(path, node.request)
        self._operators.append(
            Operator(
                node=path,
                rounds=around.rounds,
                template=template,
                output_tokens=output_tokens,
                needs=tuple(sorted(needs | around.after)),
                calls=around.calls,
                items=around.items,
                shared_by_items=_shared_elements(template, around.first_of_item),
                model=model,
                continues=continues,
                salt=node.request.get("cache_salt"),
                sure=around.sure,
                weights=around.weights,
            )
        )
        answer = self._new(Placeholder(path, output_tokens, number))
        self._chats.append((*messages, {"role": "assistant", "content": answer}))
        return _Value(answer, frozenset({number}), operator=number)

    def _map(self, node: MapNode, path: str, around: _Around) -> _Value:
        over = self._follow(around.scope, reference_of(node.over))
        lists = self._lists(node, around.scope)
        weights = around.weights
        if lists:
            items = sum(map(len, lists)) / len(lists)
            own = [len(each) / items if items else 1.0 for each in lists]
            weights = tuple(own if weights is None else map(operator.mul, weights, own))
        else:
            items = self._statistics.items(path, float(len(over.items)) if over.items is not None else over.length)
        items = min(items, node.max_items)
        count = max(1, round(items))
        first = len(self._placeholders)
        whole = self._expected(over.text)
        prefix = label_prefix(path, node, "body")
        each = self._tokens_of(prefix + node.item, None if whole is None else whole // count)
        item = self._item(Placeholder(prefix + node.item, each), over.needs, lists)
        each = self._expected(item.text) or 0
        inside = around._replace(
            prefix=prefix,
            scope={**around.scope, node.item: item},
            calls=around.calls * items,
            items=around.items * count,
            first_of_item=min(around.first_of_item, first),
            after=around.after | over.needs,
            sure=tuple(
                before and bool(items)
                for before, items in zip(around.sure, lists or [()] * self._num_rows, strict=True)
            ),
            weights=weights,
        )
        scope = self._body(node.body, inside)
        values = {name: self._follow(scope, reference_of(text)) for name, text in node.body.outputs.items()}
        needs = _needs_of(values, over.needs)
        outputs = {}
        for name, value in values.items():
            joined = self._new(Placeholder(f"{path}.{name}", count * (self._expected(value.text) or each)))
            outputs[name] = _Value(joined, needs, length=items)
        return _Value("", needs, outputs=outputs)

    def _item(
        self, placeholder: Placeholder, needs: frozenset[int], lists: tuple[tuple[Any, ...], ...] | None
    ) -> _Value:
        """The item of a map, or a field of it; as long as the known items are in the mean."""
        if not lists:
            return _Value(self._new(placeholder), needs)
        texts = tuple(tuple(map(text_of, items)) for items in lists)
        counts = Counter(text for items in texts for text in items)
        count = self._tokens(self._model).count
        tokens = sum(count(text) * times for text, times in counts.items()) / max(1, counts.total())
        return _Value(self._new(placeholder._replace(tokens=round(tokens), lists=texts)), needs, lists=lists)

    def _switch(self, node: SwitchNode, path: str, around: _Around) -> _Value:
        on = self._follow(around.scope, reference_of(node.on))
        cases = []
        for place, body in node.bodies.items():
            share = self._statistics.share(path, place, len(node.bodies))
            prefix = label_prefix(path, node, place)
            inside = around._replace(
                prefix=prefix,
                calls=around.calls * share,
                after=around.after | on.needs,
                sure=(False,) * self._num_rows,
            )
            scope = self._body(body, inside)
            cases.append({name: self._follow(scope, reference_of(text)) for name, text in body.outputs.items()})
        needs = on.needs.union(*(_needs_of(values, on.needs) for values in cases))
        outputs = {}
        for name in cases[0]:
            longest = max(self._expected(values[name].text) or 0 for values in cases)
            text = self._new(Placeholder(f"{path}.{name}", self._statistics.value_tokens(f"{path}.{name}", longest)))
            outputs[name] = _Value(text, needs)
        return _Value("", needs, outputs=outputs)

    def _loop(self, node: LoopNode, path: str, around: _Around) -> _Value:
        rounds = self._statistics.rounds(path, node.max_rounds, node.until is not None)
        values = {name: self._follow(around.scope, reference_of(text)) for name, text in node.init.items()}
        planned = min(MAX_UNROLLED, math.ceil(rounds))
        needs = _needs_of(values, frozenset())
        for number in range(planned):
            share = 1.0 if number < planned - 1 else rounds - number
            inside = around._replace(
                prefix=label_prefix(path, node, "body"),
                scope={**around.scope, **values},
                calls=around.calls * share,
                rounds=(*around.rounds, number),
                after=around.after | needs,
                sure=around.sure if number == 0 or node.until is None else (False,) * self._num_rows,
            )
            first = len(self._operators)
            scope = self._body(node.body, inside)
            values = {name: self._follow(scope, reference_of(text)) for name, text in node.body.outputs.items()}
            ends = frozenset[int]() if node.until is None else self._follow(scope, reference_of(node.until)).needs
            made = _needs_of(values, ends)
            # What the round needs of itself came after all that it began with.
            needs = made if any(number >= first for number in made) else made | needs
            # How many rounds there are may depend on a row, so what they make is not known.
            values = {name: value._replace(needs=needs, column=None) for name, value in values.items()}
        return _Value("", needs, outputs=values)

    def _follow(self, scope: Mapping[str, _Value], reference: Reference) -> _Value:
        """What a reference means. A field has a placeholder of its own."""
        value, path = scope[reference.name], reference.path
        outputs = value.outputs
        if outputs is not None:
            name, path = (path[0], path[1:]) if path else (next(iter(outputs)), ())
            value = outputs[name]
        if not path:
            return value
        if (value.text, path) not in self._fields:
            placeholder = Placeholder(str(reference), self._tokens_of(str(reference), self._expected(value.text)))
            lists = _of_items(value.lists, lambda item: value_at(item, Reference(reference.name, path)))
            self._fields[value.text, path] = self._item(placeholder, value.needs, lists).text
        return _Value(self._fields[value.text, path], value.needs)

    def _fill(self, text: str, scope: Mapping[str, _Value]) -> tuple[str, frozenset[int]]:
        """A template with the texts of its values, and what they need."""
        needs: set[int] = set()
        filled = ""
        for part in parse_template(text).parts:
            if isinstance(part, str):
                filled += without_marks(part)
            else:
                value = self._follow(scope, part)
                self._template_chars += len(value.text)
                if self._template_chars > MAX_TEMPLATE_CHARS:
                    raise TooLarge(
                        f"the texts of the workflow have more than {MAX_TEMPLATE_CHARS >> 20} Mi characters, those "
                        "that they are made of included"
                    )
                filled += value.text
                needs |= value.needs
        return filled, frozenset(needs)

    def _value(self, item: Any, scope: Mapping[str, _Value]) -> _Value:
        """An argument: a reference alone passes the value on, other text is filled, anything else is JSON."""
        if isinstance(item, str):
            alone = parse_template(item).alone
            return _Value(*self._fill(item, scope)) if alone is None else self._follow(scope, alone)
        text, needs = self._fill(_as_text(item), scope)
        return _Value(text, needs)


def _of_items(
    lists: tuple[tuple[Any, ...], ...] | None, made: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], ...] | None:
    """[rows] what is made of known items; None where they are not known, or one of them cannot be used so."""
    try:
        return None if lists is None else tuple(tuple(map(made, items)) for items in lists)
    except RowError:
        return None


def _needs_of(values: Mapping[str, _Value], needs: frozenset[int]) -> frozenset[int]:
    """What the outputs of a body need, all of which are there at once, beside `needs`."""
    return needs.union(*(value.needs for value in values.values()))


def _list(items: tuple[_Value, ...]) -> _Value:
    return _Value("", frozenset[int]().union(*(item.needs for item in items)), items=items)


def _as_text(value: Any) -> str:
    return without_marks(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _shared_elements(template: Template, first_of_item: int) -> int:
    """Elements before the first that is of a map's item."""
    own = (at for at, element in enumerate(template) if element <= -1 - first_of_item)
    return next(own, len(template))
