"""A scheduler on a fake worker, driven by halves of steps: commands may come while a step is in flight."""

from __future__ import annotations

import itertools
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache
from weft.core import wire
from weft.core.cost.model import CostModel
from weft.core.ids import pack_tokens, unpack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.step import Step
from weft.sched.policies import make_policy
from weft.sched.scheduler import Scheduled, Scheduler, SchedulerConfig
from weft.sched.sequence import Sequence
from weft.testing.fake_worker import FakeWorker, expected_tokens, fake_spec

CLIENT = 1


@dataclass
class Generation:
    """What a generate should give, and what it gave."""

    seq: int
    prompt: list[int]
    seed: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    ending: wire.Finished | wire.Failed | wire.Cancelled | None = None


class PageProgram:
    """A program that fills explicit pages by hand, one prompt in order. Every token that it samples is that of all its
    tokens."""

    def __init__(self, stepped: Stepped, space: int, num_pages: int, *, like: PageProgram | None = None):
        """`like`: it has exported its pages, as many, under the name "pages"."""
        self._stepped = stepped
        self.space = space
        self.tokens: list[int] = [] if like is None else list(like.tokens)
        self.asked: dict[int, list[int]] = {}
        """Operation -> the tokens that its sample follows."""
        self.answers = 0
        self.packed = struct.pack(f"<{num_pages}I", *range(1, num_pages + 1))
        self.do(wire.OpenSpace)
        self.do(wire.OpenQueue, queue=1)
        if like is None:
            self.do(wire.AllocPages, queue=1, first=1, count=num_pages)
        else:
            self.do(wire.ImportPages, queue=1, first=1, name="pages")

    def do(self, command: type[wire.SpaceCommand], **fields: Any) -> None:
        """Send a command with a number of its own."""
        self._stepped.say(command(space=self.space, op=self._stepped.number(), **fields))

    def wait(self, kind: str = "http", expected_in_s: float | None = None) -> None:
        """Wait for something other than the device."""
        self._stepped.say(wire.ExpectSpace(space=self.space, kind=kind, expected_in_s=expected_in_s))

    def feed(self, tokens: list[int]) -> int:
        """Write the KV of tokens, and sample what follows. Returns the operation."""
        op, start = self._stepped.number(), len(self.tokens)
        self.tokens += tokens
        self.asked[op] = list(self.tokens)
        positions = struct.pack(f"<{len(tokens)}i", *range(start, start + len(tokens)))
        common = {"space": self.space, "queue": 1, "read": self.packed, "write": self.packed}
        self._stepped.say(wire.ForwardSample(op=op, tokens=pack_tokens(tokens), positions=positions, **common))
        return op

    def pages(self) -> tuple[int, int]:
        """(pages on the device, pages that only the host has)."""
        space = self._stepped.scheduler.spaces.get(CLIENT, self.space)
        device = sum(page.page >= 0 for page in space.pages.values())
        if space.lent is None:
            return device, 0
        nodes = space.lent.run.nodes()
        return device + sum(node.num_pages for node in nodes if node.on_device), space.lent.run.num_missing

    def take(self, event: wire.Event) -> bool:
        """Whether the event answers something that was asked, as it should."""
        tokens = self.asked.pop(getattr(event, "op", 0), None)
        if tokens is None:
            return False
        if isinstance(event, wire.Finished):
            self.answers += 1
            assert unpack_tokens(event.tokens).tolist() == expected_tokens(tokens, event.op, 1, 1000)
        else:
            assert isinstance(event, wire.Cancelled), event
        return True


class Stepped:
    """Sequences of one client, and its programs with explicit pages. Invariants are checked after every call, and every
    token is that of its prompt alone."""

    def __init__(
        self,
        *,
        num_pages: int = 24,
        num_host_pages: int = 0,
        policy: str = "lru",
        page_size: int = 8,
        max_running: int = 4,
        check_every: int = 1,
        costs: CostModel | None = None,
        **config: Any,
    ):
        """`check_every`: calls from one check of the invariants to the next."""
        num_slots = max_running + 2  # the last sample for programs
        pages = {"num_device_pages": num_pages, "num_host_pages": num_host_pages, "page_size": page_size}
        self.worker = FakeWorker(fake_spec(num_slots=num_slots, **pages))
        self.cache = KVCache(num_pages, num_host_pages, page_size)
        sizes = {"max_context": num_pages * page_size, "max_running": max_running, "max_step_tokens": 64}
        sizes["num_device_slots"] = num_slots
        self.scheduler = Scheduler(
            SchedulerConfig(**{**sizes, "vocab_size": 1000, **config}),
            self.cache,
            policy=make_policy(policy),
            costs=costs,
        )
        self.now = 0.0
        self.known: dict[int, list[int]] = {}
        """The tokens of each open sequence, as its client knows them."""
        self.generations: dict[int, Generation] = {}
        self.others: list[wire.Event] = []
        self.in_flight: deque[Scheduled] = deque()
        self.programs: dict[int, PageProgram] = {}
        """By space."""
        self._numbers = itertools.count(1000)
        self._check_every = check_every
        self._calls = 0

    # ---- commands

    def say(self, *commands: wire.Command) -> None:
        self._take(self.scheduler.handle(CLIENT, commands, self.now).messages)
        self.check()

    def open(self, seq: int, tokens: list[int], *, tenant: str = "", priority: int = 0, **more: Any) -> None:
        self.known[seq] = list(tokens)
        self.say(
            wire.Open(seq=seq, tenant=tenant, namespace=tenant, priority=priority, **more),
            wire.Append(seq=seq, op=next(self._numbers), tokens=pack_tokens(tokens)),
        )

    def append(self, seq: int, tokens: list[int]) -> None:
        self.known[seq] += tokens
        self.say(wire.Append(seq=seq, op=next(self._numbers), tokens=pack_tokens(tokens)))

    def generate(self, seq: int, limit: int) -> int:
        op = next(self._numbers)
        self.generations[op] = Generation(seq, list(self.known[seq]), op, limit)
        sampling, stop = SamplingParams(seed=op), StopParams(max_tokens=limit)
        self.say(wire.Generate(seq=seq, op=op, sampling=sampling, stop=stop))
        return op

    def fork(self, seq: int, child: int) -> None:
        self.known[child] = list(self.known[seq])
        self.say(wire.Fork(seq=seq, child=child))

    def truncate(self, seq: int, num_tokens: int) -> None:
        self.say(wire.Truncate(seq=seq, num_tokens=num_tokens))
        del self.known[seq][num_tokens:]

    def release(self, seq: int, kind: str = "") -> None:
        self.say(wire.Release(seq=seq, kind=kind))
        self.known.pop(seq, None)

    def program(self, space: int, num_pages: int, *, like: PageProgram | None = None) -> PageProgram:
        """Open a space with so many pages."""
        self.programs[space] = PageProgram(self, space, num_pages, like=like)
        return self.programs[space]

    def close(self, space: int) -> None:
        self.say(wire.CloseSpace(space=space))
        del self.programs[space]

    def number(self) -> int:
        return next(self._numbers)

    # ---- steps

    def decide(self) -> Step:
        """Launch the next step, if it is not empty."""
        self.now += 0.01
        scheduled = self.scheduler.schedule(self.now)
        self._take(scheduled.events.messages)
        if not scheduled.step.is_empty:
            self.scheduler.launched(scheduled.step.step_id)
            self.in_flight.append(scheduled)
        self.check()
        return scheduled.step

    def complete(self) -> None:
        """Take in the result of the oldest step in flight, if there is one."""
        if self.in_flight:
            scheduled = self.in_flight.popleft()
            result = self.worker.carry_out(scheduled.step)
            self._take(self.scheduler.update(scheduled.flight, result, self.now).messages)
            self.check()

    def turn(self) -> Step:
        """Decide a step, and complete all but it: as the engine does, which is one step ahead."""
        was_in_flight = bool(self.in_flight)
        step = self.decide()
        assert was_in_flight or not step.is_empty or not self.scheduler.has_work, "work and no way to do it"
        while len(self.in_flight) > (not step.is_empty):
            self.complete()
        return step

    def settle(self) -> None:
        """Complete all steps in flight."""
        while self.in_flight:
            self.complete()

    def run(self, most: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            self.turn()
            if not self.scheduler.has_work and not self.in_flight:
                return
        states = {handle: s.state.value for (_, handle), s in self.scheduler.sequences.open.items()}
        raise AssertionError(f"there is work left after {most} steps: {states}")

    def finish(self) -> None:
        """Everything ends, and no page is left behind."""
        self.run()
        for op, generation in self.generations.items():
            assert generation.ending is not None, f"operation {op} never ended"
        for program in self.programs.values():
            assert not program.asked, f"space {program.space} was never answered"
        for seq in list(self.known):
            self.release(seq)
        for space in list(self.programs):
            self.close(space)
        self.run()
        self.say(wire.ResetPrefixCache())
        tiers = self.cache.tiers
        check_integrity(self.cache, [])
        assert tiers.device.num_free == tiers.device.num_pages
        assert tiers.host.num_free == tiers.host.num_pages
        assert not self.cache.trees()
        assert len(self.scheduler.sequences) == len(self.scheduler.sequences.queue) == 0
        assert not self.scheduler.sequences.without_slot

    # ---- what is there

    def sequence(self, handle: int) -> Sequence:
        return self.scheduler.sequences.open[CLIENT, handle]

    def pages(self, handle: int) -> tuple[int, int]:
        """(pages on the device, pages that only the host has) of all whole pages of a sequence that have KV."""
        sequence = self.sequence(handle)
        match = sequence.table.tree.match(sequence.index_keys.tobytes(), len(sequence.tokens) // self.cache.page_size)
        device = sum(node.num_pages for node in match.path if node.on_device)
        host = sum(node.num_pages for node in match.path if not node.on_device)
        if match.child is not None and match.child.on_device:
            device += match.child_pages
        elif match.child is not None:
            host += match.child_pages
        return device, host

    def events_of(self, op: int) -> list[wire.Event]:
        return [event for event in self.others if getattr(event, "op", None) == op]

    def check(self) -> None:
        self._calls += 1
        if self._calls % self._check_every:
            return
        sequences = self.scheduler.sequences
        check_integrity(self.cache, [s.table for s in sequences], self.scheduler.spaces.device_pages())
        for sequence in sequences:
            assert sequence.num_written <= sequence.num_computed <= sequence.total
            assert sequence.num_computed <= len(sequence.table.pages) * self.cache.page_size

    def _take(self, messages: list[tuple[int, wire.Event]]) -> None:
        for client, event in messages:
            assert client == CLIENT
            generation = self.generations.get(getattr(event, "op", 0))
            if generation is None:
                if not any(program.take(event) for program in self.programs.values()):
                    self.others.append(event)
                continue
            assert generation.ending is None, f"{event} after the end"
            if isinstance(event, wire.Token):
                generation.tokens.append(event.token)
                if generation.seq in self.known:
                    self.known[generation.seq].append(event.token)
                continue
            assert isinstance(event, wire.Finished | wire.Failed | wire.Cancelled)
            generation.ending = event
            alone = expected_tokens(generation.prompt, generation.seed, generation.limit, 1000)
            whole = isinstance(event, wire.Finished)
            assert generation.tokens == (alone if whole else alone[: len(generation.tokens)]), event
