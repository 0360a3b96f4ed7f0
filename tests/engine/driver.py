"""Drives an engine on a fake worker with random clients, and checks every token, ending and invariant."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.cache.integrity import check_integrity
from weft.core import wire
from weft.core.clock import ManualClock
from weft.core.cost.model import CostModel
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.step import Step
from weft.engine.engine import Engine
from weft.sched.policies import InterceptPolicy
from weft.sched.scheduler import SchedulerConfig
from weft.sched.sequence import SequenceState
from weft.testing.fake_worker import FakeWorker, expected_tokens, fake_spec


@dataclass
class Operation:
    """What a generate should give, and what it gave."""

    seq: int
    prompt: list[int]
    seed: int
    limit: int
    eos: bool
    tokens: list[int] = field(default_factory=list)
    ending: wire.Event | None = None


@dataclass
class ClientSequence:
    """What the client believes its sequence holds."""

    tokens: list[int]
    namespace: str
    active: int | None = None


class Driver:
    """One engine, one client."""

    def __init__(
        self,
        seed: int = 0,
        *,
        overlap: bool = True,
        eos: int = 7,
        device_s: Callable[[Step], float] = lambda step: 0.0,
        cost_model: CostModel | None = None,
        intercept: InterceptPolicy | None = None,
        **changes: object,
    ):
        self.random = random.Random(seed)
        lenient = bool(changes.pop("lenient", False))
        scheduler = {k: changes.pop(k) for k in list(changes) if k in SchedulerConfig.__struct_fields__}
        spec = fake_spec(**changes)
        self.vocab = spec.vocab_size
        self.eos = eos
        config = SchedulerConfig(
            **{
                "max_context": spec.max_context,
                "max_running": spec.num_slots,
                "max_step_tokens": 128,
                "vocab_size": spec.vocab_size,
                "eos_token_ids": [eos],
                **scheduler,
            }
        )
        self.clock = ManualClock()
        self.worker = FakeWorker(spec, device_s, lenient=lenient)
        self.engine = Engine(
            self.worker,
            config,
            self.receive,
            clock=self.clock,
            overlap=overlap,
            token_bytes=[b"x"] * spec.vocab_size,
            cost_model=cost_model,
            intercept=intercept,
        )
        self.sequences: dict[int, ClientSequence] = {}
        self.operations: dict[int, Operation] = {}
        self.others: list[wire.Event] = []
        self.numbers = iter(range(1, 10**9))

    def receive(self, client: int, envelope: wire.Envelope) -> None:
        assert client == 1
        for event in envelope.events:
            if isinstance(event, wire.Token) and event.op in self.operations:
                operation = self.operations[event.op]
                assert operation.ending is None, "a token after the end"
                operation.tokens.append(event.token)
            elif isinstance(event, wire.Finished | wire.Failed | wire.Cancelled) and event.op in self.operations:
                operation = self.operations[event.op]
                assert operation.ending is None, "two endings"
                operation.ending = event
                self.ended(operation)
            else:
                self.others.append(event)

    def ended(self, operation: Operation) -> None:
        expected = expected_tokens(operation.prompt, operation.seed, operation.limit, self.vocab)
        if operation.eos and self.eos in expected:
            expected = expected[: expected.index(self.eos) + 1]
        if isinstance(operation.ending, wire.Finished):
            assert operation.tokens == expected
            assert operation.ending.usage.num_output_tokens == len(expected)
            assert operation.ending.usage.num_prompt_tokens == len(operation.prompt)
        else:
            assert isinstance(operation.ending, wire.Cancelled), operation.ending
            assert operation.tokens == expected[: len(operation.tokens)]
        sequence = self.sequences.get(operation.seq)
        if sequence is not None:
            sequence.tokens = operation.prompt + operation.tokens
            sequence.active = None

    def send(self, *commands: wire.Command) -> None:
        self.engine.submit(1, commands)

    def text(self, longest: int = 150) -> list[int]:
        length = self.random.randrange(1, longest)
        shared = self.random.randrange(length + 1)
        base = self.random.randrange(3)
        return [(base * 100 + i) % self.vocab for i in range(shared)] + [
            self.random.randrange(self.vocab) for _ in range(length - shared)
        ]

    def open(self, tokens: list[int] | None = None, priority: int = 0, namespace: str | None = None) -> int:
        number = next(self.numbers)
        tokens = self.text() if tokens is None else tokens
        namespace = self.random.choice(["", "", "other"]) if namespace is None else namespace
        self.sequences[number] = ClientSequence(list(tokens), namespace)
        self.send(
            wire.Open(seq=number, namespace=namespace, priority=priority),
            wire.Append(seq=number, op=next(self.numbers), tokens=pack_tokens(tokens)),
        )
        return number

    def report(self, number: int, tokens: list[int]) -> None:
        """Append tokens and be told of the end."""
        op, sequence = next(self.numbers), self.sequences[number]
        sequence.tokens += tokens
        sequence.active = op
        self.operations[op] = Operation(number, list(sequence.tokens), 0, 0, False)
        self.send(wire.Append(seq=number, op=op, tokens=pack_tokens(tokens), outputs=wire.PromptOutputs()))

    def generate(self, number: int, limit: int, *, eos: bool = True, seed: int | None = None) -> int:
        op = next(self.numbers)
        sequence = self.sequences[number]
        seed = self.random.randrange(1 << 40) if seed is None else seed
        room = self.engine.info.max_context - len(sequence.tokens)
        self.operations[op] = Operation(number, list(sequence.tokens), seed, min(limit, room), eos)
        sequence.active = op
        self.send(
            wire.Generate(
                seq=number,
                op=op,
                sampling=SamplingParams(seed=seed),
                stop=StopParams(max_tokens=limit, ignore_eos=not eos),
            )
        )
        return op

    def end_turn(self, number: int, kind: str = "chat") -> list[int]:
        """End a sequence as a client does that may come back. Returns its tokens."""
        self.send(wire.Release(seq=number, kind=kind))
        return self.sequences.pop(number).tokens

    def fork(self, number: int) -> int:
        child = next(self.numbers)
        parent = self.sequences[number]
        self.sequences[child] = ClientSequence(list(parent.tokens), parent.namespace)
        self.send(wire.Fork(seq=number, child=child))
        return child

    def check(self) -> None:
        tables = [sequence.table for sequence in self.engine.scheduler.sequences]
        check_integrity(self.engine.cache, tables, self.engine.scheduler.spaces.device_pages())
        for sequence in self.engine.scheduler.sequences:
            assert sequence.num_written <= sequence.num_computed <= sequence.total
            assert (sequence.slot >= 0) == (sequence.state is SequenceState.RUNNING)
            assert sequence.num_computed <= len(sequence.table.pages) * self.engine.cache.page_size

    def step(self) -> bool:
        self.clock.advance(0.01)
        did = self.engine.step()
        self.check()
        return did

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.step() and not self.engine.busy:
                return
        raise AssertionError(f"still busy after {most} steps")

    def finish(self) -> None:
        """Everything ends, and no page is left behind."""
        self.run()
        for operation in self.operations.values():
            assert operation.ending is not None, "an operation never ended"
        self.send(*[wire.Release(seq=number) for number in self.sequences])
        self.sequences.clear()
        self.run()
        self.clock.advance(1e6)
        self.engine.cache.retention.expire(self.clock.now())
        self.send(wire.ResetPrefixCache())
        self.check()
        tiers = self.engine.cache.tiers
        assert tiers.device.num_free == tiers.device.num_pages
        assert tiers.host.num_free == tiers.host.num_pages
        assert not self.engine.cache.trees()
        assert len(self.engine.scheduler.sequences) == 0
        assert self.engine.scheduler.sequences.slots.num_free == self.engine.info.max_running
        assert not self.engine.scheduler.sequences.without_slot
        assert len(self.engine.scheduler.sequences.queue) == 0
