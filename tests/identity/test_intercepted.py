"""In float64, sequences that were intercepted give the tokens that they give alone, whatever became of their KV."""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest

from weft.config import EngineConfig
from weft.core import wire
from weft.core.clock import ManualClock
from weft.core.ids import pack_tokens, unpack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.build import build_engine
from weft.sched.policies import POLICIES

ALONE = EngineConfig(
    dtype="float64",
    max_context=192,
    max_running=16,
    num_pages=200,
    threads=1,
    device="cpu",
    prefix_cache=False,
    overlap=False,
    program_pages_wait_s=1e9,  # the clock of these tests leaps by more than any wait for room
)
TIGHT = {"num_pages": 16, "max_running": 6, "max_step_tokens": 48, "prefix_cache": True, "overlap": True}
HOST_BYTES = 40 * 1024 * 1024
SYSTEM = list(range(100, 140))
"""What the prompts of half of all sessions begin with."""
PAGED = (2, 5)
"""Sessions that fill explicit pages: as many as there is room for under all conditions."""
Act = list[wire.Command]
Told = dict[tuple[int, int, int], list[int]]
"""(session, turn, branch) -> tokens."""


class Session:
    """One program or plain client. It yields what it sends, and goes on when the generations of that have ended."""

    def __init__(self, number: int, told: Told):
        self.number = number
        self._random = random.Random(number)
        self._told = told
        self._ids = iter(range(number * 10_000 + 1, number * 10_000 + 10_000))

    def acts(self) -> Iterator[Act]:
        """Its turns, each after the one before it."""
        if self.number in PAGED:
            return self._pages()
        return self._chat() if self.number % 2 else self._program()

    def _text(self, most: int) -> list[int]:
        return [self._random.randrange(300) for _ in range(self._random.randrange(2, most))]

    def _prompt(self) -> list[int]:
        return [*(SYSTEM if self.number % 4 < 2 else []), self.number, *self._text(20)]

    def _generate(self, seq: int, turn: int, branch: int) -> wire.Generate:
        op = next(self._ids)
        self._told[self.number, turn, branch] = []
        sampling = SamplingParams(seed=op, temperature=1.0, frequency_penalty=self._random.choice([0.0, 0.4]))
        stop = StopParams(max_tokens=self._random.randrange(2, 9), ignore_eos=True)
        self.where[op] = self.number, turn, branch
        return wire.Generate(seq=seq, op=op, sampling=sampling, stop=stop)

    where: dict[int, tuple[int, int, int]]

    def _append(self, seq: int, tokens: list[int]) -> wire.Append:
        return wire.Append(seq=seq, op=next(self._ids), tokens=pack_tokens(tokens))

    def _chat(self) -> Iterator[Act]:
        """Sends all tokens again in every turn; the second turn is sent twice."""
        tokens = self._prompt()
        for turn in range(4):
            seq = next(self._ids)
            yield [wire.Open(seq=seq), self._append(seq, tokens), self._generate(seq, turn, 0)]
            if turn == 1:
                again = next(self._ids)
                yield [wire.Open(seq=again), self._append(again, tokens), self._generate(again, turn, 1)]
                yield [wire.Release(seq=again, kind="chat")]
            tokens = [*tokens, *self._told[self.number, turn, 0], *self._text(12)]
            yield [wire.Release(seq=seq, kind=self._random.choice(["chat", "tools"]))]

    def _program(self) -> Iterator[Act]:
        """Keeps its sequence; forks it, hides tokens of it, and cuts it."""
        seq, child = next(self._ids), next(self._ids)
        yield [wire.Open(seq=seq), self._append(seq, self._prompt()), self._generate(seq, 0, 0)]
        yield [wire.Expect(seq=seq, kind="http", expected_in_s=self._random.choice([None, 0.1, 50.0]))]
        yield [self._append(seq, self._text(20)), self._generate(seq, 1, 0)]
        yield [wire.Fork(seq=seq, child=child)]
        if self.number % 3 == 0:
            yield [wire.MaskTokens(seq=seq, op=next(self._ids), ranges=pack_tokens([2, 9]))]
        yield [self._append(child, self._text(6)), self._generate(child, 2, 1), self._generate(seq, 2, 0)]
        yield [wire.Release(seq=child), self._append(seq, self._text(20)), self._generate(seq, 3, 0)]
        yield [wire.Truncate(seq=seq, num_tokens=20)]
        yield [self._append(seq, self._text(20)), self._generate(seq, 4, 0)]
        yield [wire.Release(seq=seq)]

    def _pages(self) -> Iterator[Act]:
        """Fills three pages in rounds, sleeps after each, and hides tokens of the first page from the later rounds."""
        space, written = next(self._ids), 0
        at = {"space": space, "queue": 1}
        act: Act = [
            wire.OpenSpace(space=space, op=next(self._ids)),
            wire.OpenQueue(**at, op=next(self._ids)),
            wire.AllocPages(**at, op=next(self._ids), first=1, count=3),
        ]
        for turn, tokens in enumerate([[self.number, *self._text(20)], *(self._text(6) for _ in range(5))]):
            if turn == 2:
                act.append(wire.MaskPage(**at, op=next(self._ids), page=1, hidden=0b1110))
            op, pages = next(self._ids), struct.pack("<3I", 1, 2, 3)
            self.where[op], self._told[self.number, turn, 0] = (self.number, turn, 0), []
            positions = struct.pack(f"<{len(tokens)}i", *range(written, written + len(tokens)))
            packed, sampling = pack_tokens(tokens), SamplingParams(seed=op, temperature=1.0)
            forward = wire.ForwardSample(
                **at, op=op, read=pages, tokens=packed, positions=positions, write=pages, sampling=sampling
            )
            written += len(tokens)
            yield [*act, forward]
            yield [wire.ExpectSpace(space=space, kind="sleep", expected_in_s=self._random.choice([0.1, 50.0]))]
            act = []
        yield [wire.CloseSpace(space=space)]


class Served:
    """Sessions on one engine. `order` decides who goes on, and how many steps are taken before the next one does."""

    def __init__(self, config: EngineConfig, order: random.Random | None):
        self.told: Told = {}
        self._where: dict[int, tuple[int, int, int]] = {}
        self._open: set[int] = set()
        self._order = order
        self.engine = build_engine(config, self._receive)
        self.clock = self.engine.clock = ManualClock()

    def run(self, num_sessions: int) -> wire.EngineStats:
        """All sessions, to their end. Alone: one after another."""
        sessions = [Session(number, self.told) for number in range(num_sessions)]
        for session in sessions:
            session.where = self._where
        if self._order is None:
            for session in sessions:
                self._together([session])
        else:
            self._order.shuffle(sessions)
            self._together(sessions)
        stats = self.engine.stats()
        tiers = self.engine.cache.tiers
        self.engine.submit(1, [wire.ResetPrefixCache()])
        assert tiers.device.num_free + tiers.device.num_fenced == tiers.device.num_pages
        self.engine.close()
        return stats

    def _together(self, sessions: list[Session]) -> None:
        order = self._order or random.Random(0)
        waiting = deque((session.acts(), set[int]()) for session in sessions)
        while waiting:
            waiting.rotate(order.randrange(len(waiting)))
            acts, under_way = waiting[0]
            if not under_way & self._open:
                act = next(acts, None)
                if act is None:
                    waiting.popleft()
                    continue
                under_way.clear()
                under_way |= {command.op for command in act if isinstance(command, wire.Generate | wire.ForwardSample)}
                self._open |= under_way
                self.engine.submit(1, act)
            self.clock.advance(order.choice([0.0, 0.1, 30.0]))
            for _ in range(order.randrange(3)):
                self._step()
        while self.engine.busy:
            self._step()

    def _step(self) -> None:
        self.engine.advance()
        self.engine.step()

    def _receive(self, client: int, envelope: wire.Envelope) -> None:
        for event in envelope.events:
            if isinstance(event, wire.Token):
                self.told[self._where[event.op]].append(event.token)
            else:
                assert isinstance(event, wire.Finished), event
                self._open.discard(event.op)
                if event.tokens:
                    self.told[self._where[event.op]] += unpack_tokens(event.tokens)


@cache
def alone(num_sessions: int) -> Told:
    served = Served(ALONE, None)
    served.run(num_sessions)
    return served.told


def compare(policy: str, host_bytes: int, seed: int, num_sessions: int, **changes: Any) -> wire.EngineStats:
    config = msgspec.structs.replace(
        ALONE, **{**TIGHT, "intercept_policy": policy, "host_kv_bytes": host_bytes, **changes}
    )
    served = Served(config, random.Random(seed))
    stats = served.run(num_sessions)
    assert served.told == alone(num_sessions)
    return stats


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["min_waste", "swap", "improved_discard"])
def test_tokens_are_those_of_sequences_that_were_never_interrupted(policy: str) -> None:
    stats = compare(policy, HOST_BYTES, 1, 12)
    assert stats.evictions > 20
    assert stats.wait_returns["sleep"]["host"] > 2, "explicit pages came back"
    if policy != "improved_discard":
        assert stats.swapped_in_pages > 5


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host_bytes", [0, HOST_BYTES // 20, HOST_BYTES])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_no_residency_and_no_order_shows(policy: str, host_bytes: int, seed: int) -> None:
    order = ["fair", "arrival", "last"][seed]
    stats = compare(policy, host_bytes, 100 + seed, 40, return_order=order, overlap=seed != 1)
    assert stats.evictions > 50
