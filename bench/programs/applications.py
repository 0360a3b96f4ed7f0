"""The applications that are measured, each written once: the same code runs as a program beside the model and as a
client far away from it. What differs is the `World` that it is given.

Stdlib only: this file is a part of the program that is uploaded. Numbers of tokens are forced and texts are token ids,
so both sides compute the same number of tokens. The output of the model does not influence the control flow: the size
of a tool's answer is given, and the value of a thought is a sum of tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

Tokens = list[int]
Shape = dict[str, int]
PRINTABLE = bytes(33 + byte % 90 for byte in range(256))


class Text(Protocol):
    """A text that the model continues."""

    def fill(self, tokens: Tokens) -> None:
        """Append known tokens to the text."""

    async def generate(self, count: int) -> Tokens:
        """Let the model append exactly `count` tokens."""

    def fork(self) -> Text:
        """Create a text with the same tokens."""

    def drop(self) -> None:
        """Release the resources of the text."""


class World(Protocol):
    """The environment of an application."""

    def text(self) -> Text:
        """Create a text without tokens."""

    async def tool(self, tokens: Tokens) -> None:
        """Send a request to a web API."""

    async def execute(self, number: int) -> int:
        """Run code that a model wrote."""

    def mailbox(self, name: str) -> Mailbox:
        """The mailbox of an agent, for messages of others."""

    async def repeat(self, prompt: Tokens, count: int) -> Tokens:
        """Continue a text that repeats itself, by prompt lookup where that can be done."""


class Mailbox(Protocol):
    """Messages to one agent, in order."""

    def send(self, tokens: Tokens) -> None:
        """Send a message to the mailbox's agent."""

    async def get(self) -> Tokens:
        """Wait for the next message."""


class Counted:
    """Counts of the tokens that an application had computed."""

    def __init__(self) -> None:
        self.filled = 0
        self.generated = 0


def words(count: int, seed: int) -> Tokens:
    """Token ids in place of a text, equal for equal seeds. They are printable bytes in every vocabulary used here."""
    return list(random.Random(seed).randbytes(count).translate(PRINTABLE))


async def gather(tasks: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all tasks and return their results in order."""
    return list(await asyncio.gather(*tasks))


async def react(world: World, shape: Shape, seed: int) -> None:
    """ReACT: think, call a web API, read its answer; in one text."""
    text = world.text()
    text.fill(words(shape["prompt"], seed))
    for at in range(shape["rounds"]):
        action = await text.generate(shape["action"])
        await world.tool(action)
        text.fill(words(shape["result"], seed + at + 1))
    await text.generate(shape["answer"])
    text.drop()


async def codeact(world: World, shape: Shape, seed: int) -> None:
    """CodeACT: generate code, run it, read its result; in one text."""
    text = world.text()
    text.fill(words(shape["prompt"], seed))
    for at in range(shape["rounds"]):
        await text.generate(shape["action"])
        result = await world.execute(100 + at)
        text.fill(words(shape["result"], result))
    await text.generate(shape["answer"])
    text.drop()


async def swarm(world: World, shape: Shape, seed: int) -> None:
    """Swarm: agents with separate texts; each sends messages to the next one."""
    names = [f"{seed}/{at}" for at in range(shape["agents"])]
    boxes = [world.mailbox(name) for name in names]
    rounds = shape["messages"] // len(names)

    async def agent(at: int) -> None:
        text = world.text()
        text.fill(words(shape["prompt"], seed + at))
        for _ in range(rounds):
            text.fill(await boxes[at].get())
            said = await text.generate(shape["message"])
            boxes[(at + 1) % len(names)].send(said)
        text.drop()

    # The agents of one half run concurrently, and pass their messages round.
    for at in range(0, len(names), 2):
        boxes[at].send(words(shape["message"], seed))
    await gather([agent(at) for at in range(len(names))])


async def tree(world: World, shape: Shape, seed: int) -> None:
    """Tree of thought: propose several next steps for each state, value them, keep the best."""
    root = world.text()
    root.fill(words(shape["prompt"], seed))

    async def propose(state: Text, number: int) -> tuple[int, Text]:
        thought = state.fork()
        thought.fill(words(4, number))
        said = await thought.generate(shape["thought"])
        return sum(said) % 1000, thought

    states = [root]
    for depth in range(shape["depth"]):
        tasks = [propose(state, depth * 10 + at) for state in states for at in range(shape["proposals"])]
        ranked = sorted(await gather(tasks), key=lambda valued: valued[0])
        for state in states:
            state.drop()
        for _, state in ranked[shape["breadth"] :]:
            state.drop()
        states = [state for _, state in ranked[: shape["breadth"]]]
    for state in states:
        state.drop()


async def recursion(world: World, shape: Shape, seed: int) -> None:
    """Recursion of thought: divide a problem, solve each part in a separate text, and append only the answers."""

    async def solve(depth: int, number: int) -> Tokens:
        text = world.text()
        text.fill(words(shape["prompt"], 7) + words(shape["problem"], number))
        if depth:
            await text.generate(shape["divide"])
            for answer in await gather([solve(depth - 1, number * 2 + at) for at in range(2)]):
                text.fill(answer)
        answer = await text.generate(shape["answer"])
        text.drop()
        return answer

    await solve(shape["depth"], seed)


async def graph(world: World, shape: Shape, seed: int) -> None:
    """Graph of thought: summarise the parts of a document, then merge summaries two by two, keeping the best draft."""

    async def think(tokens: Tokens) -> Tokens:
        text = world.text()
        text.fill(words(shape["prompt"], 7) + tokens)
        drafts = [text.fork() for _ in range(shape["drafts"])]
        text.drop()
        for at, draft in enumerate(drafts):
            draft.fill(words(2, at))
        said = await gather([draft.generate(shape["summary"]) for draft in drafts])
        for draft in drafts:
            draft.drop()
        best: Tokens = max(said, key=lambda tokens: sum(tokens) % 1000)
        return best

    level = await gather([think(words(shape["part"], seed + at)) for at in range(shape["parts"])])
    while len(level) > 1:
        level = await gather([think(level[at] + level[at + 1]) for at in range(0, len(level), 2)])


async def skeleton(world: World, shape: Shape, seed: int) -> None:
    """Skeleton of thought: generate the points of an answer, then expand all points concurrently."""
    text = world.text()
    text.fill(words(shape["prompt"], seed))
    await text.generate(shape["skeleton"])

    async def write(at: int) -> None:
        point = text.fork()
        point.fill(words(shape["cue"], at))
        await point.generate(shape["point"])
        point.drop()

    await gather([write(at) for at in range(shape["points"])])
    text.drop()


async def prefix(world: World, shape: Shape, seed: int) -> None:
    """Prefix caching: questions about one common document."""
    document = world.text()
    document.fill(words(shape["document"], 7))

    async def ask(at: int) -> None:
        text = document.fork()
        text.fill(words(shape["question"], seed * 100 + at))
        await text.generate(shape["answer"])
        text.drop()

    await gather([ask(at) for at in range(shape["questions"])])
    document.drop()


async def lookup(world: World, shape: Shape, seed: int) -> None:
    """Speculative decoding by prompt lookup, on a text that repeats itself."""
    await world.repeat(words(shape["period"], seed) * (shape["prompt"] // shape["period"]), shape["answer"])


Application = Callable[[World, Shape, int], Awaitable[None]]
APPLICATIONS: dict[str, Application] = {
    "react": react,
    "codeact": codeact,
    "swarm": swarm,
    "tree": tree,
    "recursion": recursion,
    "graph": graph,
    "skeleton": skeleton,
    "prefix": prefix,
    "lookup": lookup,
}
SHAPES: dict[str, Shape] = {
    # Inputs and outputs: 8, 8 and 32 as in section 7.1 of the paper, which does not say how many tokens.
    "react": {"prompt": 256, "rounds": 8, "action": 24, "result": 24, "answer": 24},
    "codeact": {"prompt": 256, "rounds": 8, "action": 32, "result": 16, "answer": 24},
    "swarm": {"agents": 4, "messages": 32, "prompt": 128, "message": 16},
    "tree": {"prompt": 128, "depth": 3, "breadth": 2, "proposals": 3, "thought": 20},
    # The paper allows a depth of 5; here 15 texts instead of 63, so that 64 at once end within seconds.
    "recursion": {"prompt": 96, "problem": 24, "depth": 3, "divide": 16, "answer": 8},
    "graph": {"prompt": 64, "parts": 4, "part": 96, "drafts": 2, "summary": 16},
    "skeleton": {"prompt": 128, "skeleton": 24, "points": 4, "cue": 8, "point": 40},
    "prefix": {"document": 1500, "questions": 8, "question": 24, "answer": 8},
    "lookup": {"prompt": 192, "period": 24, "answer": 128},
}
