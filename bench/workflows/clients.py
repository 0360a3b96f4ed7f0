"""Clients of an OpenAI-compatible server that run a workflow without a planner: they know templates and when the inputs
of a call are there, and nothing of KV. Independent of Weft's workflows, so their answers are a witness too."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import httpx

from bench.workflows.shapes import Json, Workload
from weft.workflow.graph import graph_to_dict

Answers = dict[tuple[int, str], str]
"""(row, call) -> text."""
_REFERENCE = re.compile(r"\{\{(\w+)\}\}")
_TIMEOUT_S = 3600.0


class Used(NamedTuple):
    """Tokens of a run, as the server reports them for each call."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def plus(self, usage: Mapping[str, Any]) -> Used:
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return Used(
            self.prompt + usage["prompt_tokens"], self.cached + cached, self.output + usage["completion_tokens"]
        )


class GraphClient:
    """One run of a workload over HTTP, and what it found."""

    def __init__(self, workload: Workload, model: str, salt: str, http: httpx.AsyncClient):
        raw = graph_to_dict(workload.graph)
        self._nodes: dict[str, Json] = {node["id"]: node for node in raw["nodes"]}
        self._workload = workload
        self._model = model
        self._salt = salt
        self._http = http
        self._chats: dict[tuple[int, str], list[Json]] = {}
        """The messages of a call and its answer, for calls that go on from it."""
        self.answers: Answers = {}
        self.used = Used()

    @property
    def conversations(self) -> Mapping[tuple[int, str], list[Json]]:
        """The messages of every call, its answer last."""
        return self._chats

    def needs(self, name: str) -> set[str]:
        """The calls whose answers a call uses."""
        messages = self._nodes[name]["messages"]
        found = {other for message in messages for other in _REFERENCE.findall(message.get("content", ""))}
        return (found | {message["chat"] for message in messages if "chat" in message}) & self._nodes.keys()

    def in_order(self) -> list[str]:
        """All calls, those that a call needs before it."""
        done: list[str] = []
        left = list(self._nodes)
        while left:
            name = next(name for name in left if self.needs(name) <= set(done))
            left.remove(name)
            done.append(name)
        return done

    async def call(self, row: int, name: str) -> None:
        """Send a call whose inputs are there."""
        node = self._nodes[name]
        values = {**self._workload.rows[row], **{other: self.answers[row, other] for other in self.needs(name)}}
        messages: list[Json] = []
        for message in node["messages"]:
            if "chat" in message:
                messages += self._chats[row, message["chat"]]
            else:
                content = _REFERENCE.sub(lambda found: values[found[1]], message["content"])
                messages.append({"role": message["role"], "content": content})
        fields = {key: value for key, value in node.items() if key not in ("id", "op", "messages")}
        body = {"model": self._model, "messages": messages, **fields, "cache_salt": self._salt}
        reply = await self._http.post("/v1/chat/completions", json=body)
        if reply.status_code != httpx.codes.OK:
            raise RuntimeError(f"call {name} of row {row}: {reply.text[:500]}")
        found = reply.json()
        answer = found["choices"][0]["message"]["content"]
        self.used = self.used.plus(found["usage"])
        self.answers[row, name] = answer
        self._chats[row, name] = [*messages, {"role": "assistant", "content": answer}]

    async def row(self, row: int) -> None:
        """All calls of a row, each as soon as its inputs are there."""
        tasks: dict[str, asyncio.Task[None]] = {}

        async def one(name: str) -> None:
            await asyncio.gather(*(tasks[other] for other in self.needs(name)))
            await self.call(row, name)

        async with asyncio.TaskGroup() as group:
            for name in self.in_order():
                tasks[name] = group.create_task(one(name))


async def asynchronous(client: GraphClient, num_rows: int) -> None:
    """Every call as soon as its inputs are there."""
    async with asyncio.TaskGroup() as group:
        for row in range(num_rows):
            group.create_task(client.row(row))


async def query_wise(client: GraphClient, num_rows: int) -> None:
    """One row after the other; in a row, every call as soon as its inputs are there."""
    for row in range(num_rows):
        await client.row(row)


async def operator_wise(client: GraphClient, num_rows: int) -> None:
    """One operator after the other, all rows of it at once."""
    for name in client.in_order():
        async with asyncio.TaskGroup() as group:
            for row in range(num_rows):
                group.create_task(client.call(row, name))


STRATEGIES: Mapping[str, Callable[[GraphClient, int], Awaitable[None]]] = {
    "query-wise": query_wise,
    "operator-wise": operator_wise,
    "clients": asynchronous,
}


async def run_clients(strategy: str, workload: Workload, url: str, model: str, salt: str) -> GraphClient:
    """Run a workload by a strategy of `STRATEGIES`."""
    # Servers close idle connections, vLLM's after 5 s, and a request that is sent just then is lost.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as http:
        client = GraphClient(workload, model, salt, http)
        await STRATEGIES[strategy](client, len(workload.rows))
    return client
