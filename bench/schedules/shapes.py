"""Small workflows of the shapes of Helium's section 7.1, with the lengths of its workloads, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from weft.workflow.graph import WorkflowGraph, graph_from_dict

Json = dict[str, Any]


class Instance(NamedTuple):
    """A workflow, its rows, and what is known of its calls."""

    name: str
    graph: WorkflowGraph
    rows: tuple[dict[str, str], ...]
    statistics: dict[str, Any]

    @property
    def num_calls(self) -> int:
        return len(self.graph.nodes) * len(self.rows)


class _Draw:
    """Texts of drawn lengths; a word is a token."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._words = 0

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def text(self, low: int, high: int) -> str:
        start = self._words
        self._words += self.number(low, high)
        return " ".join(f"w{number}" for number in range(start, self._words))


def _call(name: str, *messages: tuple[str, str], chat: str | None = None) -> Json:
    said: list[Json] = [] if chat is None else [{"chat": chat}]
    said += [{"role": role, "content": content} for role, content in messages]
    return {"id": name, "op": "llm", "messages": said}


def _text(*names: str) -> str:
    return " ".join(f"{{{{{name}}}}}" for name in names)


def map_reduce_mmlu(draw: _Draw, agents: int) -> list[Json]:
    experts = [_call(f"expert{n}", ("system", draw.text(40, 160)), ("user", _text("question"))) for n in range(agents)]
    answers = _text(*(expert["id"] for expert in experts))
    return [*experts, _call("summary", ("system", draw.text(40, 80)), ("user", f"{_text('question')} {answers}"))]


def map_reduce_tatqa(draw: _Draw, agents: int) -> list[Json]:
    system = draw.text(40, 80)
    experts = [
        _call(
            f"expert{n}", ("system", system), ("user", f"{_text('context')} {draw.text(40, 120)} {_text('question')}")
        )
        for n in range(agents)
    ]
    answers = _text(*(expert["id"] for expert in experts))
    return [*experts, _call("summary", ("system", draw.text(40, 80)), ("user", f"{_text('question')} {answers}"))]


def debate_mmlu(draw: _Draw, agents: int) -> list[Json]:
    return _debate(draw, agents, "question")


def debate_tatqa(draw: _Draw, agents: int) -> list[Json]:
    return _debate(draw, agents, "context", "question")


def _debate(draw: _Draw, agents: int, *inputs: str) -> list[Json]:
    first = [_call(f"first{n}", ("system", draw.text(40, 120)), ("user", _text(*inputs))) for n in range(agents)]
    asked = draw.text(20, 60)
    return first + [
        _call(
            f"second{n}",
            ("user", f"{asked} {_text(*(f'first{other}' for other in range(agents) if other != n))}"),
            chat=f"first{n}",
        )
        for n in range(agents)
    ]


def reflect_tatqa(draw: _Draw, agents: int) -> list[Json]:
    """An expert, critics, and the expert again."""
    critics = max(1, agents - 1)
    expert = _call("expert", ("system", draw.text(40, 120)), ("user", _text("context", "question")))
    role = draw.text(40, 120)
    critic = [
        _call(f"critic{n}", ("system", role), ("user", f"{_text('context', 'question', 'expert')} {draw.text(20, 60)}"))
        for n in range(critics)
    ]
    advice = _text(*(one["id"] for one in critic))
    return [expert, *critic, _call("revised", ("user", f"{draw.text(20, 40)} {advice}"), chat="expert")]


def iterative_reviews(draw: _Draw, agents: int) -> list[Json]:
    """One agent, a chunk of reviews after the other."""
    system = draw.text(80, 160)
    return [
        _call(f"summary{n}", ("system", system), ("user", _text(f"chunk{n}", *([f"summary{n - 1}"] if n else []))))
        for n in range(agents)
    ]


def parallel_reviews(draw: _Draw, agents: int) -> list[Json]:
    """Experts over two chunks, then a writer."""
    roles = [draw.text(40, 120) for _ in range(agents)]
    system = draw.text(40, 80)
    experts = [
        _call(f"expert{n}_{chunk}", ("system", system), ("user", f"{_text(f'chunk{chunk}')} {role}"))
        for chunk in range(2)
        for n, role in enumerate(roles)
    ]
    return [*experts, _call("writer", ("system", draw.text(40, 80)), ("user", _text(*(one["id"] for one in experts))))]


SHAPES: dict[str, tuple[Callable[[_Draw, int], list[Json]], int]] = {
    "map_reduce_mmlu": (map_reduce_mmlu, 286),
    "map_reduce_tatqa": (map_reduce_tatqa, 374),
    "debate_mmlu": (debate_mmlu, 329),
    "debate_tatqa": (debate_tatqa, 390),
    "reflect_tatqa": (reflect_tatqa, 257),
    "iterative_reviews": (iterative_reviews, 318),
    "parallel_reviews": (parallel_reviews, 447),
}
"""Shape and mean output tokens, as measured by Helium."""

LENGTHS = {"question": (60, 300), "context": (350, 900), "chunk": (600, 1200)}


def instance(seed: int, max_calls: int) -> Instance:
    """2 to 4 agents and 2 to 4 rows, at most `max_calls` calls. Rows that share a context are neighbours."""
    fitting = [name for name, (make, _) in SHAPES.items() if 2 * len(make(_Draw(0), 2)) <= max_calls]
    name = fitting[seed % len(fitting)]
    make, output_tokens = SHAPES[name]
    draw = _Draw(seed)
    nodes, num_rows = make(draw, draw.number(2, 4)), draw.number(2, 4)
    while len(nodes) * num_rows > max_calls:
        nodes, num_rows = make(draw, draw.number(2, 4)), draw.number(2, 4)
    inputs = sorted({word for node in nodes for word in _inputs(node)})
    raw = {"version": 1, "inputs": inputs, "nodes": nodes, "outputs": {node["id"]: node["id"] for node in nodes}}
    rows = []
    shared = ""
    for number in range(num_rows):
        row = {key: draw.text(*LENGTHS[key.rstrip("0123456789")]) for key in inputs}
        if "context" in row:
            shared = row["context"] if number % 2 == 0 else shared
            row["context"] = shared
        rows.append(row)
    low, high = round(0.4 * output_tokens), round(1.6 * output_tokens)
    statistics = {node["id"]: {"output_tokens": min(512, draw.number(low, high))} for node in nodes}
    return Instance(name, graph_from_dict(raw), tuple(rows), statistics)


def _inputs(node: Json) -> list[str]:
    said = " ".join(message.get("content", "") for message in node["messages"])
    found = [word.strip("{}") for word in said.split() if word.startswith("{{")]
    return [name for name in found if name.rstrip("0123456789") in LENGTHS]
