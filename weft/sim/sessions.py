"""Plays sessions against a simulated engine, and records how they went. There are two ways to drive one:

*programs*: one sequence is kept open; after a wait, what it returned is appended and generation goes on.
*clients*: every turn is a new sequence with all tokens of the session so far, released when it has answered, as a
client of OpenAI's API does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Literal

from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.core.wire import Append, Expect, Finished, Generate, Open, Release
from weft.sim.loop import Simulation
from weft.sim.records import KnownTokens, SessionRecord, TurnRecord
from weft.sim.scripts import SessionScript, TokenSource
from weft.sim.worker import OUTPUT_TOKEN

Driving = Literal["programs", "clients"]
NO_RETURN_S = 1e9
"""The announced wait after the last turn of a session."""


class SessionPlayer:
    """Plays all sessions of a workload. One for each simulation."""

    def __init__(
        self,
        simulation: Simulation,
        tokens: TokenSource,
        known: KnownTokens,
        *,
        driving: Driving,
        announces: bool = False,
        latency_s: float = 0.0,
        on_done: Callable[[SessionRecord], None] = lambda record: None,
    ):
        """`known` is told what has been computed before. `announces`: the engine is told how long waits take. Each
        turn reaches the engine `latency_s` after it is due."""
        self.records: list[SessionRecord] = []
        self.simulation = simulation
        self.tokens = tokens
        self.known = known
        self.latency_s = latency_s
        self.announces = announces
        self.numbers = itertools.count(1)
        """Handles and operations."""
        self.shared_kinds: set[str] = set()
        """Kinds whose shared prompt some session has computed."""
        self._driving = driving
        self._on_done = on_done

    def add(self, scripts: Iterable[SessionScript]) -> None:
        """Have sessions begin when they arrive."""
        for script in scripts:
            self._begin_at(script, script.arrive_s, self._on_done)

    def begin(self, script: SessionScript, now: float, on_done: Callable[[SessionRecord], None]) -> None:
        """Begin a session at once."""
        record = SessionRecord(script.number, script.kind, now, [], num_before=script.num_before)
        self.records.append(record)
        kind = _Program if self._driving == "programs" else _Client
        kind(self, script, record, on_done).begin_turn(0, now)

    def _begin_at(self, script: SessionScript, at_s: float, on_done: Callable[[SessionRecord], None]) -> None:
        self.simulation.at(at_s, lambda due_s: self.begin(script, due_s, on_done))


class _Session:
    """A session that is being played. Subclasses say how a turn's tokens reach the engine."""

    def __init__(
        self,
        player: SessionPlayer,
        script: SessionScript,
        record: SessionRecord,
        on_done: Callable[[SessionRecord], None],
    ):
        self.player = player
        self.script = script
        self.own = player.tokens.own(script.number)
        self.handle = 0
        self.length = 0
        """Tokens of the session so far."""
        self._record = record
        self._on_done = on_done

    def submit(self, index: int, op: int, added: bytes, known: int) -> None:
        """Give the engine the turn's tokens and operation `op`, which generates. The KV of the first `known` tokens of
        the session was computed before."""
        raise NotImplementedError

    def release(self, index: int, *, is_last: bool) -> None:
        """The engine has answered turn `index`."""
        raise NotImplementedError

    def wait_kind(self, index: int) -> str:
        """What the session waits for after a turn."""
        return self.script.turns[index].wait_kind or self.script.kind

    def expected_in_s(self, index: int) -> float | None:
        """How long the wait after a turn takes, if the engine is told: that after the last one does not end. Subagents
        make it longer than is known."""
        turn = self.script.turns[index]
        if not self.player.announces or turn.subagents:
            return None
        return NO_RETURN_S if index + 1 == len(self.script.turns) else turn.wait_s

    def begin_turn(self, index: int, due_s: float) -> None:
        """The tokens of a turn are there."""
        if self.player.latency_s:
            self.player.simulation.at(due_s + self.player.latency_s, lambda _: self._ask(index, due_s))
        else:
            self._ask(index, due_s)

    def _ask(self, index: int, due_s: float) -> None:
        turn = self.script.turns[index]
        known = self.length - 1 if index else self._shared_known()  # the last token generated has no KV
        added = self._added(index)
        self.length += turn.new_tokens
        op = next(self.player.numbers)
        simulation = self.player.simulation
        asked_s = simulation.clock.now()

        def ended(event: Finished, now: float) -> None:
            first_s = asked_s + event.usage.first_token_s
            done = TurnRecord(due_s, first_s, now, self.length, known, turn.output_tokens)
            self._record.turns.append(done)
            self.length += turn.output_tokens
            self._end_turn(index, now)

        simulation.engine.on_end(op, ended)
        self.submit(index, op, added, known)

    def _shared_known(self) -> int:
        if not self.script.shared_tokens:
            return 0
        if self.script.kind in self.player.shared_kinds:
            return self.script.shared_tokens
        self.player.shared_kinds.add(self.script.kind)
        return 0

    def _added(self, index: int) -> bytes:
        shared = 0 if index else self.script.shared_tokens
        own = self.own.take(self.script.turns[index].new_tokens - shared)
        return self.player.tokens.shared(self.script.kind, shared) + own if shared else own

    def open(self) -> Open:
        """The command that opens its sequence."""
        return Open(seq=self.handle, objective=self.script.objective, deadline_s=self.script.deadline_s)

    def generate(self, index: int, op: int) -> Generate:
        """The command that generates a turn's tokens."""
        stop = StopParams(max_tokens=self.script.turns[index].output_tokens, ignore_eos=True)
        return Generate(seq=self.handle, op=op, stop=stop)

    def _end_turn(self, index: int, now: float) -> None:
        is_last = index + 1 == len(self.script.turns)
        self.release(index, is_last=is_last)
        if is_last:
            self._record.end_s = now
            self._on_done(self._record)
            return
        turn = self.script.turns[index]
        returns_s = now + turn.wait_s
        waiting = list(turn.subagents)

        def go_on(due_s: float) -> None:
            if waiting:
                self.player.begin(waiting.pop(0), due_s, lambda child: go_on(child.end_s or due_s))
                return
            due_s = max(due_s, returns_s)
            self._record.tools_s += due_s - now
            self.player.simulation.at(due_s, lambda at_s: self.begin_turn(index + 1, at_s))

        go_on(now)


class _Program(_Session):
    def submit(self, index: int, op: int, added: bytes, known: int) -> None:
        if index == 0:
            self.handle = next(self.player.numbers)
            self.player.simulation.engine.submit([self.open()])
        self.player.known.expect(self.handle, known)
        append = Append(seq=self.handle, op=next(self.player.numbers), tokens=added)
        self.player.simulation.engine.submit([append, self.generate(index, op)])

    def release(self, index: int, *, is_last: bool) -> None:
        if is_last:
            self.player.known.forget(self.handle)
            self.player.simulation.engine.submit([Release(seq=self.handle)])
        else:
            kind, expected = self.wait_kind(index), self.expected_in_s(index)
            self.player.simulation.engine.submit([Expect(seq=self.handle, kind=kind, expected_in_s=expected)])


class _Client(_Session):
    _history = b""

    def submit(self, index: int, op: int, added: bytes, known: int) -> None:
        self._history += added
        self.handle = next(self.player.numbers)
        self.player.known.expect(self.handle, known)
        append = Append(seq=self.handle, op=next(self.player.numbers), tokens=self._history)
        self.player.simulation.engine.submit([self.open(), append, self.generate(index, op)])
        self._history += pack_tokens([OUTPUT_TOKEN]) * self.script.turns[index].output_tokens

    def release(self, index: int, *, is_last: bool) -> None:
        self.player.known.forget(self.handle)
        kind = self.script.last_kind if is_last else self.wait_kind(index)
        expected = self.expected_in_s(index)
        self.player.simulation.engine.submit([Release(seq=self.handle, kind=kind, expected_in_s=expected)])
