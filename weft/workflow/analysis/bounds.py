"""What no schedule can do without: prompt tokens that are different, and time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.cost.model import ForwardModel, StepShape
from weft.workflow.analysis.operators import Operator, Unrolled
from weft.workflow.analysis.prefix_tree import PrefixTree
from weft.workflow.analysis.row_prompts import I64, RowPrompts, both
from weft.workflow.analysis.statistics import RowValue

_Rows = npt.NDArray[np.float64]
_Place = tuple[int | None, str]


def answer_nodes(unrolled: Unrolled, tree: PrefixTree) -> list[int | None]:
    """[operators] the node of the prefix tree in which prompts go on with an operator's prompt and answer; None where
    none does, or where the chat template changes what went before."""
    found: list[int | None] = [None] * len(unrolled.operators)
    for number, node in enumerate(tree.nodes):
        if node.placeholder is not None and node.parent is not None:
            source = unrolled.placeholders[node.placeholder].operator
            if source is not None and tree.paths[source][-1:] == (node.parent,):
                found[source] = number
    return found


class _Known(NamedTuple):
    """A piece of prompts whose beginning is known, in so many calls: one in each row, or one for each item."""

    rows: I64
    """[calls]"""
    classes: I64
    """[calls] equal where the prompts up to the end of the piece are."""
    tokens: I64
    """[calls] that are surely in the piece, and in no other of another class."""
    lengths: tuple[int, ...] | None = None
    """[rows] how many calls, if they are those of items."""


def min_prefill_tokens(unrolled: Unrolled, tree: PrefixTree, prompts: RowPrompts) -> list[float]:
    """[operators] tokens that are surely computed, in any order of calls: each known piece of a prompt counts for
    the first operator that surely has it, once for each class of calls. Behind a value that is not known, prompts may
    be alike that differ here: of all that go on with one there counts the longest text that is the same in all rows."""
    known = _known_pieces(tree, prompts)
    sure = [np.array(operator.sure, np.bool_) for operator in unrolled.operators]
    seen = [np.zeros(0 if piece is None else len(piece.rows), np.bool_) for piece in known]
    complete: set[int] = set()
    counted = [dict[int, int]() for _ in tree.paths]
    """[operators] tokens by node."""
    for path, rows, mine in zip(tree.paths, sure, counted, strict=True):
        for node in path:
            piece = known[node]
            if piece is None:
                break
            if node in complete:
                continue
            if rows.all():
                complete.add(node)
            calls = rows[piece.rows]
            classes, firsts = np.unique(piece.classes[calls], return_index=True)
            mine[node] = int(piece.tokens[calls][firsts][~seen[node][classes]].sum())
            seen[node][classes] = True
    apart = _apart(tree, counted)
    least = [float(sum(tokens for node, tokens in mine.items() if node in apart)) for mine in counted]
    goes_on = {node.parent for number, node in enumerate(tree.nodes) if seen[number].any()}
    longest: dict[int, I64] = {}
    for number, path in enumerate(tree.paths):
        place = next((place for place, node in enumerate(path) if known[node] is None), 0)
        last = known[path[place - 1]] if place else None
        if last is None or path[place - 1] in goes_on or path[place - 1] not in apart:
            continue
        tokens = sum(_static_tokens(tree, node) for node in path[place:])
        classes = np.unique(last.classes[sure[number][last.rows]])
        before = longest.setdefault(path[place - 1], np.zeros(len(last.rows), np.int64))
        least[number] += float(np.maximum(tokens - before[classes], 0).sum())
        before[classes] = np.maximum(before[classes], tokens)
    return least


def _apart(tree: PrefixTree, counted: Sequence[Mapping[int, int]]) -> set[int]:
    """Nodes no two of which can be the same tokens. A value may be what another value, or a text, is in its place: of
    what goes on in one place there is one value here, or all texts, whichever has most tokens with what follows."""
    whole = [0] * len(tree.nodes)
    for mine in counted:
        for one, tokens in mine.items():
            whole[one] += tokens
    groups: dict[_Place, dict[int | None, list[int]]] = {}
    """By the piece before and the model: pieces by their value, all texts together."""
    best: dict[_Place, list[int]] = {}

    def choose(place: _Place) -> int:
        if place not in groups:
            return 0
        best[place] = max(groups[place].values(), key=lambda nodes: sum(whole[one] for one in nodes))
        return sum(whole[one] for one in best[place])

    for number in reversed(range(len(tree.nodes))):
        node = tree.nodes[number]
        whole[number] += choose((number, node.model))
        groups.setdefault((node.parent, node.model), {}).setdefault(node.placeholder, []).append(number)
    apart = set[int]()
    waiting = [place for place in groups if place[0] is None]
    for place in waiting:
        choose(place)
    while waiting:
        place = waiting.pop()
        apart.update(best[place])
        waiting += [(one, place[1]) for one in best[place] if (one, place[1]) in best]
    return apart


def _known_pieces(tree: PrefixTree, prompts: RowPrompts) -> list[_Known | None]:
    """[nodes] None: behind a value that is not known, or such a value."""
    every = np.arange(prompts.num_rows)
    root = _Known(every, np.zeros_like(every), np.zeros_like(every))
    known: list[_Known | None] = []
    for number, node in enumerate(tree.nodes):
        before = root if node.parent is None else known[node.parent]
        value = prompts.values[number]
        if before is None:
            known.append(None)
        elif node.placeholder is None:
            known.append(before._replace(tokens=np.full(len(before.rows), _static_tokens(tree, number))))
        else:
            known.append(None if value is None else _with_value(before, value))
    return known


def _with_value(before: _Known, value: RowValue) -> _Known | None:
    if value.least is None:
        return None
    least = np.array(value.least(), np.int64)
    if value.lengths is None:
        classes = np.array(value.classes, np.int64)[before.rows]
        return before._replace(classes=both(before.classes, classes), tokens=least[classes])
    classes = np.array(value.items, np.int64)
    if before.lengths is None:
        rows = np.repeat(before.rows, value.lengths)
        return _Known(rows, both(before.classes[rows], classes), least[classes], value.lengths)
    if before.lengths != value.lengths:
        return None
    return before._replace(classes=both(before.classes, classes), tokens=least[classes])


def _static_tokens(tree: PrefixTree, number: int) -> int:
    """Tokens of a piece that are surely its own: the first one may be part of the value before."""
    node = tree.nodes[number]
    if node.placeholder is not None:
        return 0
    is_behind_value = node.parent is not None and tree.nodes[node.parent].placeholder is not None
    return len(node.elements) - is_behind_value


class EngineWork(NamedTuple):
    """What engines of one model have to do at least, over all calls."""

    prefill_tokens: float = 0.0
    decodes: float = 0.0
    """Output tokens but the first of each call, which comes with its prompt."""
    outputs: float = 0.0
    decode_kv: float = 0.0
    """KV entries that decoding reads."""
    own_kv: float = 0.0
    """Of those, what calls share with no other: their outputs."""

    def plus(self, other: EngineWork) -> EngineWork:
        """The sum of two amounts of work."""
        return EngineWork(*(a + b for a, b in zip(self, other, strict=True)))


def operator_work(operator: Operator, prompt_tokens: _Rows, prefill_tokens: float) -> EngineWork:
    """Of an operator's calls in rows whose prompts have so many tokens [rows], if `prefill_tokens` are computed."""
    output = operator.output_tokens
    calls = operator.calls * len(prompt_tokens)
    later = output * (output - 1) / 2
    return EngineWork(
        prefill_tokens=prefill_tokens,
        decodes=calls * (output - 1),
        outputs=calls * output,
        decode_kv=operator.calls * (output - 1) * float(prompt_tokens.sum()) + calls * later,
        own_kv=calls * later,
    )


def work_bound_s(
    work: EngineWork, forward: ForwardModel, max_step_tokens: int, kv_tokens: int, max_rows: int | None = None
) -> float:
    """Seconds that one engine takes for the work at least, however it is batched: query tokens are in the best of
    steps, of which there are no fewer than the limits of a step allow, and each output row and KV entry costs its part.
    `max_rows` are the calls that decode in one, None: any number."""
    tokens = work.prefill_tokens + work.decodes
    if not tokens:
        return 0.0
    steps = math.ceil(max(tokens / max_step_tokens, work.own_kv / kv_tokens, work.decodes / (max_rows or math.inf)))
    return (
        _steps_bound_s(tokens, steps, forward, max_step_tokens)
        + forward.per_row_s * work.decodes
        + forward.per_output_s * work.outputs
        + forward.per_decode_kv_s * work.decode_kv
    )


def _steps_bound_s(tokens: float, least_steps: float, forward: ForwardModel, max_step_tokens: int) -> float:
    """Seconds of at least so many steps that compute so many query tokens, the weights read in each of them included.

    On the lower convex hull of a step's time over its tokens, steps of equal size are the best that n steps can do
    (Jensen), and the total is convex in n: it is least at the fewest steps, or where a step's size is a corner of the
    hull.
    """
    sizes = [0, *(knot for knot in forward.knots if knot < max_step_tokens), max_step_tokens]
    hull: list[tuple[int, float]] = []
    for size, seconds in zip(sizes, map(forward.tokens_s, sizes), strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (size, seconds)):
            hull.pop()
        hull.append((size, seconds))
    corners, least_s = zip(*hull, strict=True)
    counts = [least_steps, *(tokens / size for size in corners[1:] if tokens / size > least_steps)]
    each_s = np.interp(tokens / np.array(counts), corners, least_s) + forward.base_s
    return float((counts * each_s).min())


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def call_bound_s(operator: Operator, prompt_tokens: _Rows, forward: ForwardModel) -> _Rows:
    """[rows] seconds of one call at least, alone and with its prompt's KV there but for the last token."""
    fixed_s = forward.predict_s(StepShape.decodes(1, 0))
    output = operator.output_tokens
    kv = output * prompt_tokens + output * (output - 1) / 2
    return output * fixed_s + forward.per_decode_kv_s * kv


def chain_bound_s(operators: Sequence[Operator], call_s: Sequence[_Rows]) -> float:
    """Seconds of the longest chain of calls that depend on each other, in the row where it is longest; `call_s`
    [operators][rows]. Calls that not every row makes count for nothing."""
    ends: list[_Rows] = []
    for operator, own_s in zip(operators, call_s, strict=True):
        start = np.max([ends[need] for need in operator.needs], axis=0) if operator.needs else np.zeros_like(own_s)
        ends.append(start + (own_s if operator.calls >= 1 else 0.0))
    return max((float(end.max(initial=0.0)) for end in ends), default=0.0)
