"""Conversations of several turns: lengths and pauses of each turn, and the loop that sends them to a server.

Every turn sends the whole history, as clients of OpenAI's API do: as token ids, including the exact answers, or as
messages with the answers' texts. A turn is due when the pause after the previous answer is over.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from weft.cli.bench.client import StreamedAnswer
from weft.cli.bench.clock import LoadClock, MachineClock
from weft.cli.bench.lengths import Lengths
from weft.cli.bench.load import offer
from weft.cli.bench.measure import Failure, Outcome
from weft.cli.bench.workload import BenchRequest, Message, Prompt, filler
from weft.sim.scripts import SessionScript

SendTurn = Callable[[BenchRequest, float, StreamedAnswer], Awaitable[Outcome]]
"""Sends a request that is due at a given time and fills in the answer. Does not raise."""


class Turn(NamedTuple):
    """The new part of a prompt, and the answer that it asks for."""

    pause_s: float
    """Pause after the previous answer; 0 for the first turn."""
    said: list[int] | str
    output_len: int
    subagents: tuple[Script, ...] = ()
    """Conversations in the pause, one after the other; it lasts until they have ended."""


class Script(NamedTuple):
    """The script of one conversation."""

    system: list[int] | str
    turns: list[Turn]
    kind: str = ""
    num_before: int = 0
    """As in `SessionScript`."""

    @property
    def num_turns(self) -> int:
        """Turns, those of subagents included."""
        return sum(1 + sum(child.num_turns for child in turn.subagents) for turn in self.turns)


class HeldConversation(NamedTuple):
    """How a conversation went. Times are seconds of the load's clock."""

    kind: str
    due_s: float
    """Its arrival."""
    end_s: float
    """When its last turn ended."""
    waited_s: float
    """Time between answers and the turns after them: pauses and subagents."""
    outcomes: list[Outcome]
    """By turn."""
    num_before: int = 0
    """As in `SessionScript`."""


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


def session_scripts(sessions: Iterable[SessionScript], seed: int, as_text: bool) -> list[Script]:
    """Fill sessions of the simulator with random tokens, or words. What sessions of a kind share is the same in all."""
    return [_filled(session, seed, as_text) for session in sessions]


def _filled(session: SessionScript, seed: int, as_text: bool) -> Script:
    draw = random.Random(f"session {seed} {session.number}")
    system = filler(random.Random(f"shared {seed} {session.kind}"), session.shared_tokens, as_text)
    turns: list[Turn] = []
    pause_s = 0.0
    subagents: tuple[Script, ...] = ()
    for number, turn in enumerate(session.turns):
        own = turn.new_tokens - (0 if number else session.shared_tokens)
        turns.append(Turn(pause_s, filler(draw, own, as_text), turn.output_tokens, subagents))
        pause_s = turn.wait_s
        subagents = tuple(_filled(child, seed, as_text) for child in turn.subagents)
    return Script(system, turns, session.kind, session.num_before)


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
) -> tuple[list[HeldConversation], float]:
    """Run conversations that start at the times of `schedule`; returns how they went, then how those of subagents went,
    and seconds.

    `max_concurrency` limits conversations, including their pauses. A failed turn ends its conversation; the turns after
    it are failures of kind `not_sent`. A conversation whose subagent fails goes on.
    """
    clock = clock or MachineClock()
    holder = _Holder(send, fields, on_done, clock)
    conversations, elapsed_s = await offer(held, schedule, holder.hold, max_concurrency=max_concurrency, clock=clock)
    return conversations + holder.subagents, elapsed_s


class _Holder:
    """Holds single conversations, and collects how those of subagents went."""

    def __init__(self, send: SendTurn, fields: dict[str, Any], on_done: Callable[[Outcome], None], clock: LoadClock):
        self.subagents: list[HeldConversation] = []
        self._send = send
        self._fields = fields
        self._on_done = on_done
        self._clock = clock

    async def hold(self, script: Script, due_s: float) -> HeldConversation:
        """Hold a conversation whose first turn is due at this time."""
        outcomes: list[Outcome] = []
        history = ConversationHistory(script.system)
        turn_due_s, end_s, waited_s = due_s, due_s, 0.0
        for turn in script.turns:
            if outcomes:
                turn_due_s = await self._pause(turn, end_s)
                waited_s += turn_due_s - end_s
            answer = StreamedAnswer()
            request = BenchRequest(history.hear(turn.said), turn.output_len, self._fields)
            outcome = await self._send(request, turn_due_s, answer)
            last = len(outcomes) + 1 == len(script.turns)
            if not isinstance(outcome, Failure) and not last:
                outcome = history.answer(answer) or outcome
            end_s = self._clock.now()
            outcomes.append(outcome)
            self._on_done(outcome)
            if isinstance(outcome, Failure):
                break
        for _ in range(len(script.turns) - len(outcomes)):
            outcomes.append(Failure("not_sent", "the previous turn failed"))
            self._on_done(outcomes[-1])
        return HeldConversation(script.kind, due_s, end_s, waited_s, outcomes, script.num_before)

    async def _pause(self, turn: Turn, now_s: float) -> float:
        """Wait for a turn after an answer that ended at `now_s`; returns when it is due."""
        at_s = now_s
        for child in turn.subagents:
            self.subagents.append(await self.hold(child, at_s))
            at_s = self.subagents[-1].end_s
        due_s = max(at_s, now_s + turn.pause_s)
        await self._clock.until(due_s)
        return due_s
