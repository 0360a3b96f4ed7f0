"""Random packed commands of several clients, invalid ones among them: when all is given back, nothing is left.

The clients know nothing of the engine's state: they name sequences, spaces and queues that exist, that are gone, and
that never were. Every operation must end exactly once, and releases and drops must leave no sequence, no page, no slot
and no entry of a queue, whatever failed before.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from typing import Any

import pytest

from weft.cache.integrity import check_integrity
from weft.core import wire
from weft.core.clock import ManualClock
from weft.core.grammar import Grammar
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.engine import Engine
from weft.sched.scheduler import SchedulerConfig
from weft.testing.fake_worker import FakeWorker, fake_spec

CLIENTS = (1, 2, 3)
VOCAB = 200


class Fuzz:
    """One engine and clients that say anything."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.clock = ManualClock()
        spec = fake_spec(
            vocab_size=VOCAB,
            num_device_pages=self.random.choice([24, 60, 200]),
            num_host_pages=self.random.choice([0, 16]),
            num_slots=12,
            num_embed_slots=16,
            max_context=320,
        )
        config = SchedulerConfig(
            max_context=320,
            max_running=8,
            max_step_tokens=self.random.choice([24, 128]),
            max_waiting=30,
            prefix_wait_steps=self.random.choice([2, 64]),
            vocab_size=VOCAB,
            eos_token_ids=[7],
            alloc_wait_s=0.5,
        )
        self.engine = Engine(
            FakeWorker(spec, lenient=True),
            config,
            self.receive,
            clock=self.clock,
            overlap=self.random.random() < 0.8,
            token_bytes=[bytes([65 + i % 26]) for i in range(VOCAB)],
        )
        self.ops = 0
        self.open_ops: dict[int, int] = {}
        self.ended: Counter[int] = Counter()
        self.handles: dict[int, set[int]] = {client: set() for client in CLIENTS}
        self.spaces: dict[int, set[int]] = {client: set() for client in CLIENTS}

    def receive(self, client: int, envelope: wire.Envelope) -> None:
        for event in envelope.events:
            assert not isinstance(event, wire.Failed) or event.error.kind != "internal", event
            if isinstance(event, wire.Finished | wire.Failed | wire.Cancelled) and event.op in self.open_ops:
                self.ended[event.op] += 1

    # What clients say

    def op(self) -> int:
        self.ops += 1
        return self.ops

    def handle(self, client: int) -> int:
        """Small numbers, so that most of them name something that exists."""
        number = self.random.randrange(1, 14)
        if self.random.random() < 0.3 and self.handles[client]:
            number = self.random.choice(sorted(self.handles[client]))
        return number

    def tokens(self) -> bytes:
        roll = self.random.random()
        if roll < 0.08:
            return pack_tokens([5, VOCAB + 3])
        if roll < 0.12:
            return b"abc"
        if roll < 0.16:
            return b""
        if roll < 0.2:
            return pack_tokens([3] * 400)
        base = self.random.randrange(2)
        shared = [(base * 50 + i) % VOCAB for i in range(self.random.randrange(60))]
        return pack_tokens(shared + [self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, 30))])

    def outputs(self) -> wire.PromptOutputs | None:
        choice = self.random.randrange(8)
        if choice > 3:
            return None
        return [
            wire.PromptOutputs(logprobs=2),
            wire.PromptOutputs(hidden="mean"),
            wire.PromptOutputs(dist=3),
            wire.PromptOutputs(logprobs=10**6),
        ][choice]

    def grammar(self) -> Grammar | None:
        roll = self.random.random()
        return Grammar.regex("A+") if roll < 0.1 else Grammar.regex("(") if roll < 0.14 else None

    def sequence_command(self, client: int) -> wire.Command:
        random, seq = self.random, self.handle(client)
        kind = random.choice(
            ["open"] * 3 + ["append"] * 4 + ["generate"] * 4 + ["fork"] * 4 + ["release"] * 2
            + ["truncate", "hold", "cancel", "priority", "mask", "retain", "end", "demote", "prefetch", "expect"]
        )  # fmt: skip
        match kind:
            case "open":
                namespace = random.choice(["", "", "n"])
                return wire.Open(
                    seq=seq, tenant=random.choice("ab"), namespace=namespace, priority=random.choice([0, 1])
                )
            case "append":
                return wire.Append(seq=seq, op=self.op(), tokens=self.tokens(), outputs=self.outputs())
            case "generate":
                sampling = SamplingParams(temperature=-1.0 if random.random() < 0.1 else 1.0, seed=random.randrange(99))
                stop = StopParams(max_tokens=random.randrange(1, 40), stop=[b"QRS"] if random.random() < 0.2 else [])
                return wire.Generate(seq=seq, op=self.op(), sampling=sampling, stop=stop, grammar=self.grammar())
            case "fork":
                return wire.Fork(seq=seq, child=random.randrange(1, 14))
            case "release":
                return wire.Release(seq=seq)
            case "truncate":
                return wire.Truncate(seq=seq, num_tokens=random.choice([-1, 0, 3, 20, 10**6]))
            case "hold":
                return wire.Hold(seq=seq, ttl_s=random.choice([0.0, 0.05, 100.0]), op=random.choice([0, self.op()]))
            case "retain":
                ttl_s, weight = random.choice([0.05, 100.0, math.nan]), random.choice([0.0, 1.0, math.inf])
                return wire.Retain(**self.target(seq), ttl_s=ttl_s, weight=weight)
            case "end":
                return wire.EndRetain(op=self.op(), retain=self.op() - random.randrange(1, 50))
            case "demote":
                return wire.Demote(**self.target(seq))
            case "prefetch":
                return wire.Prefetch(**self.target(seq))
            case "expect":
                expected_in_s = random.choice([None, 1.0, -1.0, math.inf])
                return wire.Expect(seq=seq, kind="http", expected_in_s=expected_in_s, op=random.choice([0, self.op()]))
            case "cancel":
                return wire.Cancel(seq=seq)
            case "priority":
                return wire.SetPriority(seq=seq, priority=random.randrange(-2, 3))
            case _:
                ranges = random.choice([b"", struct.pack("<2i", 0, 2), struct.pack("<2i", 5, 10**6), b"abc"])
                return wire.MaskTokens(seq=seq, op=self.op(), ranges=ranges)

    def target(self, seq: int) -> dict[str, Any]:
        if self.random.random() < 0.5:
            return {"op": self.op(), "seq": seq}
        return {"op": self.op(), "tokens": self.tokens(), "namespace": self.random.choice(["", "n"])}

    def space_command(self, client: int) -> wire.Command:
        random = self.random
        space, queue = random.randrange(1, 5), random.randrange(1, 3)
        at = {"space": space, "queue": queue, "op": self.op()}
        pages = struct.pack("<2I", *random.choices(range(1, 5), k=2))
        match random.randrange(11):
            case 9:
                return wire.ExpectSpace(space=space, kind=random.choice(["http", "", "queue"]), expected_in_s=1.0)
            case 0:
                reserve = random.choice([0, 0, 3, 10**6])
                return wire.OpenSpace(
                    space=space, op=self.op(), reserve_pages=reserve, namespace=random.choice(["", "n"])
                )
            case 1 | 2:
                return wire.OpenQueue(space=space, queue=queue, op=self.op())
            case 3 | 4:
                return wire.AllocPages(**at, first=random.randrange(1, 5), count=random.choice([0, 1, 3, 10**6]))
            case 5:
                return wire.FreePages(**at, pages=pages)
            case 6:
                return wire.ExportPages(**at, pages=pages, name=random.choice(["x", "", "y"]))
            case 7:
                return wire.ImportPages(**at, first=random.randrange(5, 9), name=random.choice("xyz"))
            case 8:
                return wire.ForwardSample(
                    **at,
                    read=pages,
                    tokens=pack_tokens([3, 4]),
                    positions=struct.pack("<2i", 0, 1),
                    write=random.choice([pages, b"", b"abc"]),
                )
            case _:
                return random.choice([wire.CloseSpace(space=space), wire.Sync(**at), wire.CloseQueue(**at)])

    def say(self) -> None:
        client = self.random.choice(CLIENTS)
        commands = [
            self.space_command(client) if self.random.random() < 0.25 else self.sequence_command(client)
            for _ in range(self.random.randrange(1, 6))
        ]
        if self.random.random() < 0.01:
            commands.append(wire.ResetPrefixCache())
        for command in commands:
            if isinstance(command, wire.Open | wire.Fork):
                self.handles[client].add(command.seq if isinstance(command, wire.Open) else command.child)
            if isinstance(command, wire.OpenSpace):
                self.spaces[client].add(command.space)
            if (op := wire.answered_op(command)) is not None:
                self.open_ops[op] = client
        self.engine.submit(client, wire.decode_commands(wire.encode_commands(commands)))

    def step(self) -> None:
        self.clock.advance(0.01)
        self.engine.advance()
        self.engine.publish(0)
        if self.engine.busy:
            self.engine.step()
        tables = [sequence.table for sequence in self.engine.scheduler.sequences]
        check_integrity(self.engine.cache, tables, self.engine.scheduler.spaces.device_pages())

    def give_back(self) -> None:
        """Every client releases all it ever named, in any order, or vanishes."""
        dropped = set()
        for client in CLIENTS:
            if self.random.random() < 0.4:
                self.engine.drop_client(client)
                dropped.add(client)
                continue
            commands: list[wire.Command] = [wire.Release(seq=seq) for seq in self.handles[client]]
            commands += [wire.CloseSpace(space=space) for space in self.spaces[client]]
            self.random.shuffle(commands)
            for command in commands:
                self.engine.submit(client, wire.decode_commands(wire.encode_commands([command])))
                if self.random.random() < 0.3:
                    self.step()
        while self.engine.busy or self.engine.compiling or self.engine.waiting_for_room:
            self.step()
        self.engine.publish(0)
        for op, client in self.open_ops.items():
            if client not in dropped:
                assert self.ended[op] == 1, f"operation {op} ended {self.ended[op]} times"

    def check_empty(self) -> None:
        engine = self.engine
        scheduler = engine.scheduler
        assert engine.is_empty
        assert len(engine.scheduler.sequences) == 0
        assert len(scheduler.sequences.queue) == 0
        assert not scheduler.sequences.running
        assert not scheduler.sequences.without_slot
        assert scheduler.sequences.slots.num_free == 8
        self.clock.advance(1e6)
        engine.cache.retention.expire(self.clock.now())
        engine.submit(9, [wire.ResetPrefixCache()])
        tiers = engine.cache.tiers
        # Copies of a step that was never built still fence their pages; the next step lets them go.
        for pool in (tiers.device, tiers.host):
            assert pool.num_free + pool.num_fenced == pool.num_pages
        assert not engine.cache.trees()
        assert scheduler.spaces.num_pages == 0
        engine.close()


def run(seed: int, num_turns: int) -> None:
    fuzz = Fuzz(seed)
    for _ in range(num_turns):
        fuzz.say()
        if fuzz.random.random() < 0.5:
            fuzz.step()
        if fuzz.random.random() < 0.005:
            client = fuzz.random.choice(CLIENTS)
            fuzz.engine.drop_client(client)
            fuzz.open_ops = {op: owner for op, owner in fuzz.open_ops.items() if owner != client}
            fuzz.handles[client].clear()
            fuzz.spaces[client].clear()
    fuzz.give_back()
    fuzz.check_empty()


@pytest.mark.parametrize("seed", range(12))
def test_random_commands_leave_nothing(seed: int) -> None:
    run(seed, 120)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_random_commands_leave_nothing(seed: int) -> None:
    run(seed, 600)
