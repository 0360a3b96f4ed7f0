"""Conversations of several turns: lengths and pauses of each turn, and the loop that sends them to a server.

Every turn sends the whole history, as clients of OpenAI's API do: as token ids, including the exact answers, or as
messages with the answers' texts. A turn is due when the pause after the previous answer is over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from weft.cli.bench.client import StreamedAnswer
from weft.cli.bench.clock import LoadClock, MachineClock
from weft.cli.bench.lengths import Lengths
from weft.cli.bench.measure import Failure, Outcome
from weft.cli.bench.shapes import Conversations
from weft.cli.bench.workload import BenchRequest, Message, Prompt, filler

SendTurn = Callable[[BenchRequest, float, StreamedAnswer], Awaitable[Outcome]]
"""Sends a request that is due at a given time and fills in the answer. Does not raise."""


class Turn(NamedTuple):
    """The new part of a prompt, and the answer that it asks for."""

    pause_s: float
    """Pause after the previous answer; 0 for the first turn."""
    said: list[int] | str
    output_len: int


class Script(NamedTuple):
    """The script of one conversation."""

    system: list[int] | str
    turns: list[Turn]


class Pauses(NamedTuple):
    """Time between an answer and the next turn, in seconds: a user's or, for a share of the turns, a tool's."""

    think_s: float
    """Mean of an exponential distribution; 0: none."""
    tool_s: float
    tool_share: float

    def draw(self, source: random.Random) -> float:
        """Draw the seconds of one pause from `source`."""
        mean = self.tool_s if source.random() < self.tool_share else self.think_s
        return source.expovariate(1 / mean) if mean > 0 else 0.0


class Workload(NamedTuple):
    """Distributions of the turns, lengths and pauses of conversations."""

    turns: Lengths
    system_len: int
    """Tokens of a system prompt that all conversations of a run share."""
    first: Lengths
    further: Lengths
    """New tokens of a turn, the first one and later ones."""
    outputs: Lengths
    pause: Callable[[random.Random], float]


def workload_of(shape: Conversations, scale: float, time_scale: float) -> Workload:
    """Make a workload of a published shape, its lengths times `scale` and its pauses times `time_scale`."""
    mean, deviation = shape.pause_s

    def pause(source: random.Random) -> float:
        return time_scale * max(0.0, source.gauss(mean, deviation))

    first, further, outputs = (each.scaled(scale) for each in (shape.first, shape.further, shape.outputs))
    return Workload(shape.turns, 0, first, further, outputs, pause)


def scripts(workload: Workload, seed: int, count: int, as_text: bool) -> list[Script]:
    """Draw `count` conversations; the same seed gives the same ones."""
    draw = random.Random(f"conversations {seed}")
    system = filler(draw, workload.system_len, as_text)
    return [Script(system, list(_turns(workload, draw, as_text))) for _ in range(count)]


def _turns(workload: Workload, draw: random.Random, as_text: bool) -> Iterator[Turn]:
    for number in range(workload.turns.draw(draw)):
        lengths = workload.further if number else workload.first
        pause = workload.pause(draw) if number else 0.0
        yield Turn(pause, filler(draw, lengths.draw(draw), as_text), workload.outputs.draw(draw))


class ConversationHistory:
    """The messages or token ids of a conversation so far, in the form of the next request."""

    def __init__(self, system: list[int] | str):
        self._ids: list[int] = [] if isinstance(system, str) else list(system)
        self._messages: list[Message] = (
            [{"role": "system", "content": system}] if isinstance(system, str) and system else []
        )
        self._as_text = isinstance(system, str)

    def hear(self, said: list[int] | str) -> Prompt:
        """Add the user's part of a turn and return the whole prompt."""
        if isinstance(said, str):
            self._messages.append({"role": "user", "content": said})
            return list(self._messages)
        self._ids += said
        return list(self._ids)

    def answer(self, answer: StreamedAnswer) -> Failure | None:
        """Add an answer. Returns a failure if the server sent no token ids, as the history would then be incomplete."""
        if self._as_text:
            self._messages.append({"role": "assistant", "content": "".join(answer.text)})
            return None
        if answer.usage is not None and len(answer.token_ids) != answer.usage["completion_tokens"]:
            return Failure(
                "no_token_ids", "the server does not return all token ids of its answers; try --endpoint chat"
            )
        self._ids += answer.token_ids
        return None


async def hold(
    held: Sequence[Script],
    schedule: Iterable[float],
    send: SendTurn,
    *,
    fields: dict[str, Any],
    max_concurrency: int | None = None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
    clock: LoadClock | None = None,
) -> tuple[list[list[Outcome]], float]:
    """Run conversations that start at the times of `schedule`; returns outcomes by conversation and turn, and seconds.

    `max_concurrency` limits conversations, including their pauses. A failed turn ends its conversation; the turns after
    it are failures of kind `not_sent`.
    """
    clock = clock or MachineClock()
    slots = asyncio.Semaphore(max_concurrency or max(1, len(held)))
    began = clock.now()

    async def one(script: Script, due: float) -> list[Outcome]:
        async with slots:
            outcomes: list[Outcome] = []
            history = ConversationHistory(script.system)
            for turn in script.turns:
                if outcomes:
                    due = clock.now() + turn.pause_s
                    await clock.until(due)
                answer = StreamedAnswer()
                outcome = await send(BenchRequest(history.hear(turn.said), turn.output_len, fields), due, answer)
                last = len(outcomes) + 1 == len(script.turns)
                if not isinstance(outcome, Failure) and not last:
                    outcome = history.answer(answer) or outcome
                outcomes.append(outcome)
                on_done(outcome)
                if isinstance(outcome, Failure):
                    break
            missing = len(script.turns) - len(outcomes)
            outcomes += [Failure("not_sent", "the previous turn failed")] * missing
            for outcome in outcomes[len(outcomes) - missing :]:
                on_done(outcome)
            return outcomes

    tasks = []
    async with asyncio.TaskGroup() as group:
        for script, at in zip(held, schedule, strict=True):
            await clock.until(began + at)
            tasks.append(group.create_task(one(script, began + at)))
    return [task.result() for task in tasks], clock.now() - began
