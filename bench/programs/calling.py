"""The function-calling agent of the paper's figure 7 as a program, with its optimisations one by one: what is uploaded,
stdlib and `weft.sdk` only.

A prompt consists of a part of the agent's own, the specifications of APIs that many agents use, those of APIs that this
agent calls once, and a request. Calls follow: the model writes one, the API is called, and an acknowledgement is
appended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from bench.programs.applications import Shape, Tokens, words
from weft.sdk import UnknownHandle, http, own_model
from weft.sdk.pages import Page
from weft.sdk.queues import Queue
from weft.sdk.sampling import Stop, greedy
from weft.sdk.sequence import Sequence

STEPS = ("program", "+export", "+fire", "+drop")
CALLING: Shape = {"own": 64, "often": 4, "once": 4, "spec": 128, "request": 32, "calls": 8, "call": 24, "reply": 8}
"""Tokens; `often`, `once` and `calls` are numbers of specifications and calls."""


class Prompt:
    """The parts of a prompt, in their order."""

    def __init__(self, shape: Shape, seed: int):
        self.own = words(shape["own"], seed)
        self.often = [token for at in range(shape["often"]) for token in words(shape["spec"], 50 + at)]
        self.once = [words(shape["spec"], seed + 1 + at) for at in range(shape["once"])]
        self.request = words(shape["request"], seed + 1000)

    def tokens(self) -> Tokens:
        """All tokens of the prompt."""
        return [*self.own, *self.often, *(token for spec in self.once for token in spec), *self.request]


class Agent:
    """One run. `fire`: API calls are not awaited."""

    def __init__(self, args: dict[str, Any]):
        self.shape: Shape = args["shape"]
        self.step = STEPS.index(args["step"])
        self.seed = int(args["seed"])
        self.url = str(args["tool_url"])
        self.under_way: list[Awaitable[Any]] = []
        self.generated = 0
        self.most_pages = 0
        self.last_pages = 0

    async def call(self, tokens: Tokens) -> None:
        """Call an API; without waiting for its answer if `fire` is set."""
        answer = http.post(self.url, bytes(len(tokens)))
        if self.step >= STEPS.index("+fire"):
            self.under_way.append(answer)
        else:
            (await answer).check()

    async def on_sequence(self) -> None:
        """Run the logic of the client as a program beside the model."""
        shape, prompt = self.shape, Prompt(self.shape, self.seed)
        async with Sequence() as seq:
            seq.append(prompt.tokens())
            for at in range(shape["calls"]):
                said: Tokens = []
                async for part in seq.generate(greedy(), Stop(max_tokens=shape["call"], ignore_eos=True), text=False):
                    said += part.tokens
                self.generated += len(said)
                await self.call(said)
                seq.append(words(shape["reply"], at))

    async def on_pages(self) -> None:
        """Import the specifications that all agents use from an export, and drop those used once after their use."""
        shape, prompt, sampler = self.shape, Prompt(self.shape, self.seed), greedy()
        size = (await own_model()).page_size
        async with Queue() as queue:
            often = await self._often(queue, prompt, size)
            own = queue.alloc_pages(-(-shape["own"] // size))
            once = [queue.alloc_pages(-(-shape["spec"] // size)) for _ in prompt.once]
            tail_tokens = shape["request"] + shape["calls"] * (shape["call"] + shape["reply"])
            tail = queue.alloc_pages(-(-tail_tokens // size))
            kept: list[list[Page]] = [often, list(own), *(list(pages) for pages in once), list(tail)]
            # Positions are those of the plain prompt, in which the exported part lies in between.
            after = len(prompt.own) + len(prompt.often)
            rest = [token for spec in prompt.once for token in spec] + prompt.request
            fed = prompt.own + rest
            place = after + len(rest)
            positions = [*range(len(prompt.own)), *range(after, place)]
            write = [page for pages in kept[1:] for page in pages]
            read = [page for pages in kept for page in pages]
            self.most_pages = len(read)
            for at in range(shape["calls"]):
                said: Tokens = []
                while len(said) < shape["call"]:
                    token = await queue.forward_sample(fed, positions, read=read, write=write, sampler=sampler)
                    said.append(token)
                    fed, positions, write = [token], [place], list(tail)
                    place += 1
                self.generated += len(said)
                await self.call(said)
                reply = words(shape["reply"], at)
                fed, positions = said[-1:] + reply, list(range(place - 1, place + len(reply)))
                place += len(reply)
                if self.step >= STEPS.index("+drop") and at < len(once):
                    # The specification of this call is not needed any more.
                    queue.free_pages(kept[2 + at])
                    kept[2 + at] = []
                    read = [page for pages in kept for page in pages]
            self.last_pages = len(read)

    async def _often(self, queue: Queue, prompt: Prompt, size: int) -> list[Page]:
        """The specifications that all agents use. The first agent computes and exports them."""
        name = f"apis/{len(prompt.own)}/{len(prompt.often)}"
        try:
            return await queue.import_pages(name)
        except UnknownHandle:
            pages, inputs = queue.alloc_pages(len(prompt.often) // size), queue.alloc_embeds(len(prompt.often))
            start = len(prompt.own)
            queue.embed_text(prompt.often, range(start, start + len(prompt.often)), inputs)
            queue.forward(inputs=inputs, write=pages)
            queue.free_embeds(inputs)
            await queue.export_pages(pages, name)
            return list(pages)


async def main(args: dict[str, Any]) -> dict[str, Any]:
    agent = Agent(args)
    if agent.step >= STEPS.index("+export"):
        await agent.on_pages()
    else:
        await agent.on_sequence()
    for answer in await asyncio.gather(*agent.under_way):
        answer.check()
    return {"generated": agent.generated, "most_pages": agent.most_pages, "last_pages": agent.last_pages}
