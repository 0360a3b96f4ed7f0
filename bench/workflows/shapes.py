"""The eight workflows of Helium's section 7: operators, rows, and lengths as measured there, divided by a scale.

Texts are letters, one token each with the tokenizer of random checkpoints, so lengths are exact. Every call generates a
number of tokens that is drawn with the workflow, around the mean of the paper.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.workflow.graph import WorkflowGraph, graph_from_dict, graph_to_dict

Json = dict[str, Any]
LETTERS = tuple(range(65, 91))
"""Token ids of the capital letters in the tokenizer of random checkpoints."""
MARKUP_TOKENS = 10
"""About what the chat template adds to a message."""


class Workload(NamedTuple):
    """A workflow and its rows."""

    name: str
    graph: WorkflowGraph
    rows: tuple[Mapping[str, str], ...]
    num_distinct: int
    """Calls of a row that differ from each other."""

    @property
    def has_equal_calls(self) -> bool:
        """Whether some calls of a row are equal."""
        return self.num_distinct < len(self.graph.nodes)

    @property
    def num_calls(self) -> int:
        return len(self.graph.nodes) * len(self.rows)


class _Draw:
    """Texts and lengths, from a seed."""

    def __init__(self, seed: int, scale: float):
        self._random = random.Random(seed)
        self._scale = scale

    def text(self, tokens: int) -> str:
        """Letters, `tokens / scale` of them, no two texts alike."""
        length = max(4, round(tokens / self._scale) - MARKUP_TOKENS // 2)
        return "".join(chr(self._random.choice(LETTERS)) for _ in range(length))

    def about(self, tokens: int) -> int:
        """A number from 0.5 to 1.5 times `tokens / scale`."""
        return max(1, round(self._random.uniform(0.5, 1.5) * tokens / self._scale))


class _Graph:
    """Collects the calls of a graph."""

    def __init__(self, draw: _Draw, output_tokens: int, *, duplicates: bool):
        self._draw = draw
        self._duplicates = duplicates
        self._output_tokens = output_tokens
        self.nodes: list[Json] = []

    def text(self, tokens: int) -> str:
        return self._draw.text(tokens)

    def call(self, name: str, user: str, system: str = "", chat: str = "", tokens: int = 0) -> str:
        """Add a call, after a `system` message or in the conversation `chat`. Returns a reference to its answer."""
        messages: list[Json] = [{"chat": chat}] if chat else []
        messages += [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        tokens = tokens or self._draw.about(self._output_tokens)
        self.nodes.append({"id": name, "op": "llm", "messages": messages, "max_tokens": tokens})
        return f"{{{{{name}}}}}"

    def again(self, name: str, other: str) -> None:
        """Add a call equal to the call `other`; without duplicates, one that begins like it."""
        (equal,) = (node for node in self.nodes if node["id"] == other)
        *messages, last = equal["messages"]
        if not self._duplicates:
            last = {**last, "content": last["content"] + self.text(0)}
        self.nodes.append({**equal, "id": name, "messages": [*messages, last]})


def map_reduce_mmlu(graph: _Graph) -> None:
    """14 experts, of whom 7 differ, and one summary."""
    answers = []
    for number in range(14):
        if number < 7:
            graph.call(f"expert{number}", "{{question}}", graph.text(55))
        else:
            graph.again(f"expert{number}", f"expert{number - 7}")
        answers.append(f"{{{{expert{number}}}}}")
    graph.call("summary", "{{question}}" + "".join(answers), graph.text(260))


def map_reduce_tatqa(graph: _Graph) -> None:
    """7 experts with roles and one summary, for each of 6 questions over one context."""
    system, roles, task = graph.text(40), [graph.text(30) for _ in range(7)], graph.text(340)
    for question in range(6):
        asked = f"{{{{context}}}}{{{{question{question}}}}}"
        answers = [
            graph.call(f"expert{question}_{number}", f"{asked}{role}", system) for number, role in enumerate(roles)
        ]
        graph.call(f"summary{question}", asked + "".join(answers), task)


def debate_mmlu(graph: _Graph) -> None:
    """3 agents, 2 rounds."""
    _debate(graph, "", "{{question}}", 60, 10)


def debate_tatqa(graph: _Graph) -> None:
    """3 agents, 2 rounds, for each of 6 questions over one context."""
    for question in range(6):
        _debate(graph, str(question), f"{{{{context}}}}{{{{question{question}}}}}", 40, 80)


def _debate(graph: _Graph, suffix: str, asked: str, system_tokens: int, task_tokens: int) -> None:
    roles = [graph.text(system_tokens) for _ in range(3)]
    first = [graph.call(f"first{n}_{suffix}", asked, roles[n]) for n in range(3)]
    for n in range(3):
        others = "".join(first[other] for other in range(3) if other != n)
        graph.call(f"second{n}_{suffix}", graph.text(task_tokens) + others, chat=f"first{n}_{suffix}")


def reflect_tatqa(graph: _Graph) -> None:
    """An expert, 2 critics and a revision, for each of 6 questions over one context."""
    system, critic = graph.text(150), graph.text(60)
    roles, task = [graph.text(30) for _ in range(2)], graph.text(220)
    for question in range(6):
        asked = f"{{{{context}}}}{{{{question{question}}}}}"
        answer = graph.call(f"expert{question}", asked, system)
        advice = [graph.call(f"critic{question}_{n}", f"{asked}{answer}{role}", critic) for n, role in enumerate(roles)]
        graph.call(f"revised{question}", task + "".join(advice), chat=f"expert{question}")


def iterative_reviews(graph: _Graph) -> None:
    """A summary that six chunks of reviews refine, one after the other."""
    system, summary = graph.text(100), ""
    for number in range(6):
        summary = graph.call(f"summary{number}", f"{{{{chunk{number}}}}}{summary}", system)


def parallel_reviews(graph: _Graph) -> None:
    """7 experts over 6 chunks, one report of each expert, and a writer."""
    roles, task = [graph.text(50) for _ in range(7)], graph.text(1000)
    system = graph.text(50)
    reports = []
    for number, role in enumerate(roles):
        notes = [graph.call(f"note{number}_{chunk}", f"{{{{chunk{chunk}}}}}{role}", system) for chunk in range(6)]
        reports.append(graph.call(f"report{number}", role + "".join(notes), task))
    graph.call("writer", "".join(reports), graph.text(1250))


def trading(graph: _Graph, branches: int = 8, rounds: int = 2) -> None:
    """4 analysts, 2 researchers and a manager, 8 branches and a fund manager: 88 calls, of which 56 differ.

    The paper gives 19 agents and 88 operators and not how they divide. A branch is here: the analysts again, as calls
    equal to the first ones, a trader, three risk managers, and two of them once more after they heard the others. More
    rounds are further answers of the researchers and of these two risk managers.
    """
    subjects = ("market", "social", "news", "fundamentals")
    analysts = [graph.call(f"report_{subject}", f"{{{{{subject}}}}}", graph.text(150)) for subject in subjects]
    facts = "".join(analysts)
    bull = graph.call("bull", facts, graph.text(200))
    bear = graph.call("bear", facts + bull, graph.text(200))
    for number in range(2, rounds):
        bull = graph.call(f"bull_{number}", bear, chat="bull" if number == 2 else f"bull_{number - 1}")
        bear = graph.call(f"bear_{number}", bull, chat="bear" if number == 2 else f"bear_{number - 1}")
    plan = graph.call("manager", facts + bull + bear, graph.text(200))
    risks = [graph.text(150) for _ in range(3)]
    system, verdicts = graph.text(120), []
    for branch in range(branches):
        for subject in subjects:
            graph.again(f"report{branch}_{subject}", f"report_{subject}")
        trader = graph.call(f"trader{branch}", facts + plan + graph.text(150), system)
        first = [graph.call(f"risk{branch}_{n}", facts + plan + trader, risks[n]) for n in range(3)]
        again = [
            graph.call(f"answer{branch}_{n}", "".join(first[other] for other in range(3) if other != n),
                       chat=f"risk{branch}_{n}")
            for n in range(2)
        ]  # fmt: skip
        for number in range(2, rounds):
            before = [f"answer{branch}_{n}" if number == 2 else f"answer{branch}_{n}_{number - 1}" for n in range(2)]
            again = [
                graph.call(f"answer{branch}_{n}_{number}", again[1 - n] + first[2], chat=before[n]) for n in range(2)
            ]
        verdicts += [trader, first[2], *again]
    graph.call("fund", facts + plan + "".join(verdicts), graph.text(200))


class _Shape(NamedTuple):
    make: Callable[..., None]
    """Adds the calls to a `_Graph`."""
    output_tokens: int
    """Mean of a call."""
    inputs: Mapping[str, int]
    """Input -> tokens."""
    rows: int
    num_distinct: int


_CONTEXT = {"context": 440, **{f"question{number}": 50 for number in range(6)}}
_CHUNKS = {f"chunk{number}": 1350 for number in range(6)}
SHAPES: Mapping[str, _Shape] = {
    "map_reduce_mmlu": _Shape(map_reduce_mmlu, 286, {"question": 100}, 200, 8),
    "map_reduce_tatqa": _Shape(map_reduce_tatqa, 374, _CONTEXT, 100, 48),
    "debate_mmlu": _Shape(debate_mmlu, 329, {"question": 90}, 200, 6),
    "debate_tatqa": _Shape(debate_tatqa, 390, _CONTEXT, 100, 36),
    "reflect_tatqa": _Shape(reflect_tatqa, 257, _CONTEXT | {"context": 500}, 200, 24),
    "iterative_reviews": _Shape(iterative_reviews, 318, dict.fromkeys(_CHUNKS, 970), 200, 6),
    "parallel_reviews": _Shape(parallel_reviews, 447, _CHUNKS, 100, 50),
    "trading": _Shape(trading, 508, {"market": 2600, "social": 600, "news": 3000, "fundamentals": 3400}, 16, 56),
}
"""Prompts have about the least, mean and greatest lengths of the paper; see the test."""


def workload(
    name: str,
    scale: float,
    max_calls: int | None = None,
    seed: int = 0,
    *,
    duplicates: bool = True,
    num_rows: int | None = None,
    **changes: int,
) -> Workload:
    """A workflow with lengths divided by `scale`, and at most the rows of the paper: as many as give `max_calls` calls,
    one at least; or `num_rows`. Without `duplicates` no two calls of a row are equal. `changes` are arguments of the
    function of the workflow, for trading `branches` and `rounds`."""
    shape = SHAPES[name]
    draw = _Draw(seed, scale)
    graph = _Graph(draw, shape.output_tokens, duplicates=duplicates)
    shape.make(graph, **changes)
    common: Json = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": list(LETTERS)}
    raw = {
        "version": 1,
        "inputs": list(shape.inputs),
        "nodes": [{**node, **common} for node in graph.nodes],
        "outputs": _results(graph.nodes),
    }
    if num_rows is None:
        num_rows = shape.rows if max_calls is None else max(1, min(shape.rows, max_calls // len(graph.nodes)))
    rows = [{key: draw.text(tokens) for key, tokens in shape.inputs.items()} for _ in range(num_rows)]
    num_distinct = len({json.dumps([{**node, "id": ""}]) for node in graph.nodes})
    return Workload(name, graph_from_dict(raw), tuple(rows), num_distinct)


def salted(workload: Workload, salt: str) -> WorkflowGraph:
    """The graph, its KV told apart from that of all other salts."""
    return _with_fields(workload.graph, lambda node: {"cache_salt": salt})


def told_apart(graph: WorkflowGraph) -> WorkflowGraph:
    """The graph, whose nodes have no equal calls: each has a name of its own in a field that answers do not depend
    on."""
    return _with_fields(graph, lambda node: {"user": node["id"]})


def _with_fields(graph: WorkflowGraph, fields: Callable[[Json], Json]) -> WorkflowGraph:
    raw = graph_to_dict(graph)
    return graph_from_dict(raw | {"nodes": [{**node, **fields(node)} for node in raw["nodes"]]})


def _results(nodes: Sequence[Json]) -> dict[str, str]:
    """Every call's answer, so that contenders can be compared."""
    return {node["id"]: node["id"] for node in nodes}
