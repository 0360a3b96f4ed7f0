"""Workloads of the benchmark of workflows, its clients and its count of the minimum."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from bench.workflows import tokens
from bench.workflows.clients import STRATEGIES, GraphClient
from bench.workflows.shapes import SHAPES, told_apart, workload
from weft.workflow.graph import graph_to_dict
from weft.workflow.passes import optimise

PAPER = {
    "map_reduce_mmlu": (15, 165, 446, 4380),
    "map_reduce_tatqa": (48, 578, 931, 3544),
    "debate_mmlu": (6, 156, 642, 1129),
    "debate_tatqa": (36, 569, 1175, 1829),
    "reflect_tatqa": (24, 725, 1048, 1716),
    "iterative_reviews": (6, 1082, 1282, 1421),
    "parallel_reviews": (50, 1475, 1858, 4458),
    "trading": (88, 774, 3457, 18615),
}
"""Calls of a row, and the least, mean and greatest prompt."""


def play(name: str, strategy: str, max_calls: int) -> tuple[GraphClient, list[dict[str, Any]]]:
    """A workload on a server that answers with as many letters as it is asked for."""
    work = workload(name, 8, max_calls)
    sent: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        sent.append(body)
        text = (f"{len(body['messages'])}{body['messages'][-1]['content']}"[::-1] * 9)[: body["max_tokens"]]
        prompt = sum(len(message["content"]) + 10 for message in body["messages"])
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
        return httpx.Response(200, json={"choices": [{"message": {"content": text}}], "usage": usage})

    async def run() -> GraphClient:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
            client = GraphClient(work, "model", "salt", http)
            await STRATEGIES[strategy](client, len(work.rows))
        return client

    return asyncio.run(run()), sent


@pytest.mark.parametrize("name", SHAPES)
def test_lengths_are_about_those_of_the_paper(name: str) -> None:
    calls, *lengths = PAPER[name]
    client, sent = play(name, "clients", calls * 3)
    assert len(sent) == calls * (3 if SHAPES[name].rows > 1 else 1)
    prompts = [sum(len(message["content"]) + 10 for message in body["messages"]) for body in sent]
    found = [min(prompts), sum(prompts) / len(prompts), max(prompts)]
    for length, wanted in zip(found, lengths, strict=True):
        # Markup of messages is not divided by the scale.
        assert 0.7 * wanted / 8 <= length <= 1.35 * wanted / 8 + 20, (found, [wanted / 8 for wanted in lengths])
    mean = client.used.output / len(sent)
    assert 0.75 <= 8 * mean / SHAPES[name].output_tokens <= 1.25


@pytest.mark.parametrize("name", SHAPES)
def test_calls_that_differ(name: str) -> None:
    work = workload(name, 8, 1)
    merged = optimise(work.graph).graph
    assert len(merged.nodes) == work.num_distinct == SHAPES[name].num_distinct
    assert len(graph_to_dict(work.graph)["nodes"]) == PAPER[name][0]
    assert len(optimise(told_apart(work.graph)).graph.nodes) == PAPER[name][0]
    alone = workload(name, 8, 1, duplicates=False)
    assert len(optimise(alone.graph).graph.nodes) == alone.num_distinct == PAPER[name][0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_send_the_same_calls(strategy: str) -> None:
    reference, sent = play("debate_mmlu", "clients", 18)
    client, others = play("debate_mmlu", strategy, 18)
    assert client.answers == reference.answers
    assert sorted(map(json.dumps, others)) == sorted(map(json.dumps, sent))
    rows = [next(iter(body["messages"]))["content"] for body in others]
    assert len(rows) == 18


def test_order_of_strategies() -> None:
    work = workload("debate_mmlu", 8, 18)
    questions = [row["question"] for row in work.rows]

    def rows_of(strategy: str) -> list[int]:
        _, sent = play("debate_mmlu", strategy, 18)
        return [questions.index(body["messages"][1]["content"]) for body in sent]

    assert rows_of("query-wise") == [0] * 6 + [1] * 6 + [2] * 6
    assert rows_of("operator-wise") == [0, 1, 2] * 6


@pytest.mark.parametrize(
    ("calls", "total", "prefill"),
    [
        ([([1, 2, 3], [4])], 4, 3),
        ([([1, 2, 3], [4]), ([1, 2, 5], [6])], 6, 4),
        ([([1, 2], [3, 4]), ([1, 2, 3, 4, 9], [7])], 6, 3),
        ([([1, 2], [3, 4]), ([8, 3, 4], [7])], 8, 5),
        ([([1, 2], [3]), ([1, 2], [3])], 3, 2),
    ],
)
def test_minimum(calls: Any, total: int, prefill: int) -> None:
    assert tokens.count(calls) == tokens.TrieTokens(total, prefill)
