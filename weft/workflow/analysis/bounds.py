"""What no schedule can do without: prompt tokens that are different, and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.cost.model import ForwardModel, StepShape
from weft.workflow.analysis.operators import Operator, Unrolled
from weft.workflow.analysis.prefix_tree import PrefixTree
from weft.workflow.analysis.row_prompts import RowPrompts

_Rows = npt.NDArray[np.float64]


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


def min_prefill_tokens(unrolled: Unrolled, tree: PrefixTree, prompts: RowPrompts) -> list[float]:
    """[operators] expected tokens of the tree of all calls' prompts, less answers that stand behind their own prompts,
    which decoding computes: each piece counts for the first operator that has it, once for each class of rows."""
    answers = set(answer_nodes(unrolled, tree))
    seen: set[int] = set()
    least = []
    for number, operator in enumerate(unrolled.operators):
        tokens, elements = 0.0, 0
        for node in tree.paths[number]:
            elements += prompts.elements[node]
            if node in seen or node in answers:
                continue
            seen.add(node)
            _, firsts = np.unique(prompts.classes[node], return_index=True)
            times = operator.calls if elements > operator.shared_by_items else min(1.0, operator.calls)
            tokens += times * int(prompts.tokens[node][firsts].sum())
        least.append(tokens)
    return least


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
    """Seconds that one engine takes for the work at least, however it is batched: each token, output row and KV entry
    costs what it costs in the best of steps, and there are no fewer steps than the limits of a step allow. `max_rows`
    are the calls that decode in one, None: any number."""
    tokens = work.prefill_tokens + work.decodes
    if not tokens:
        return 0.0
    steps = math.ceil(max(tokens / max_step_tokens, work.own_kv / kv_tokens, work.decodes / (max_rows or math.inf)))
    sizes = [max_step_tokens, *(knot for knot in forward.knots if knot < max_step_tokens)]
    per_token_s = min(forward.tokens_s(size) / size for size in sizes)
    return (
        steps * forward.base_s
        + per_token_s * tokens
        + forward.per_row_s * work.decodes
        + forward.per_output_s * work.outputs
        + forward.per_decode_kv_s * work.decode_kv
    )


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
