"""The environment of an application that runs as a program beside the model. Together with `applications` it is the
uploaded source: see `packing.source_of`."""

from __future__ import annotations

from typing import Any

from bench.programs.applications import APPLICATIONS, Counted, Mailbox, Text, Tokens
from weft.sdk import http, messaging
from weft.sdk.sampling import Stop, greedy
from weft.sdk.sequence import Sequence

CHILD = "def main(n):\n    return sum(i * i for i in range(n)) % 1000\n"
MATCH, DRAFT = 2, 8
"""Tokens that have to agree, and tokens of a draft, as vLLM's prompt lookup is often set."""


class Beside:
    """A `World` whose texts are sequences, which keep their KV."""

    def __init__(self, tool_url: str):
        self.counted = Counted()
        self.notes: dict[str, int] = {}
        self._tool_url = tool_url

    def text(self) -> Text:
        return BesideText(self.counted, Sequence())

    async def tool(self, tokens: Tokens) -> None:
        (await http.post(self._tool_url, bytes(len(tokens)))).check()

    async def execute(self, number: int) -> int:
        return int(await messaging.launch(source=CHILD, args=number).join())

    def mailbox(self, name: str) -> Mailbox:
        return BesideMailbox(name)

    async def repeat(self, prompt: Tokens, count: int) -> Tokens:
        """Like `examples/programs/speculative_decoding.py`, but to a fixed number of tokens."""
        tokens, start, passes = list(prompt), len(prompt), 0
        self.counted.filled += start
        async with Sequence() as seq:
            seq.append(tokens[:-1])
            while len(tokens) < start + count:
                draft = _draft(tokens, min(DRAFT, start + count - len(tokens) - 1))
                checked = await seq.score([tokens[-1], *draft, 33], 1)
                passes += 1
                said = [entry.top.max_index() for entry in checked[1:]]
                right = 0
                while right < len(draft) and draft[right] == said[right]:
                    right += 1
                seq.truncate(len(tokens) + right)
                tokens += said[: right + 1]
        self.counted.generated += count
        self.notes = {"passes": passes}
        return tokens[start:]


class BesideText:
    def __init__(self, counted: Counted, sequence: Sequence):
        self._counted, self._sequence = counted, sequence

    def fill(self, tokens: Tokens) -> None:
        self._counted.filled += len(tokens)
        self._sequence.append(tokens)

    async def generate(self, count: int) -> Tokens:
        found: Tokens = []
        stop = Stop(max_tokens=count, ignore_eos=True)
        async for part in self._sequence.generate(greedy(), stop, text=False, whole=True):
            found += part.tokens
        self._counted.generated += len(found)
        return found

    def fork(self) -> Text:
        return BesideText(self._counted, self._sequence.fork())

    def drop(self) -> None:
        self._sequence.release()


class BesideMailbox:
    """A topic: messages go through the host, as between programs."""

    def __init__(self, name: str):
        self._name = name
        self._inbox = messaging.subscribe(name)

    def send(self, tokens: Tokens) -> None:
        messaging.broadcast(self._name, tokens)

    async def get(self) -> Tokens:
        return list((await self._inbox.get()).value)


def _draft(tokens: Tokens, count: int) -> Tokens:
    """The tokens that followed an earlier occurrence of the last tokens."""
    end = tokens[-MATCH:]
    for at in range(len(tokens) - MATCH - 1, -1, -1):
        if tokens[at : at + MATCH] == end:
            return tokens[at + MATCH : at + MATCH + count]
    return []


async def main(args: dict[str, Any]) -> dict[str, Any]:
    world = Beside(args["tool_url"])
    await APPLICATIONS[args["app"]](world, args["shape"], args["seed"])
    return {"filled": world.counted.filled, "generated": world.counted.generated, **world.notes}
