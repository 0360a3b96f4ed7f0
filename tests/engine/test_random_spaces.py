"""Random commands on explicit pages beside random sequences: all operations end, nothing leaks, and clients are
isolated."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import pytest

from tests.engine.driver import Driver
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.sched.policies import make_policy
from weft.testing.fake_worker import most_likely


@dataclass
class Loop:
    """A program's loop by hand: what it has put into its pages, and what it waits for."""

    space: int
    pages: list[int]
    tokens: list[int]
    waiting: int | None = None
    rests: int = 0
    """Acts of others that it waits for something other than the device."""


@dataclass
class Clients:
    driver: Driver
    loops: dict[int, Loop] = field(default_factory=dict)
    compared: int = 0

    def number(self) -> int:
        return next(self.driver.numbers)

    def act(self) -> None:
        random = self.driver.random
        choice = random.random()
        for loop in self.loops.values():
            loop.rests = max(loop.rests - 1, 0)
        free = [loop for loop in self.loops.values() if loop.waiting is None and not loop.rests]
        if (choice < 0.2 and len(self.loops) < 5) or not self.loops:
            self.open()
        elif choice < 0.35 and free:
            self.wait(random.choice(free))
        elif choice < 0.75 and free:
            self.feed(random.choice(free))
        elif choice < 0.82 and free and len(self.loops) < 6:
            self.export(random.choice(free))
        elif choice < 0.86:
            self.close(random.choice(list(self.loops)))
        elif choice < 0.92:
            self.wait(random.choice(list(self.loops.values())))
        else:
            self.nonsense(random.choice(list(self.loops.values())))

    def open(self) -> None:
        random = self.driver.random
        space, count = self.number(), random.randrange(1, 6)
        pages = list(range(1, count + 1))
        random.shuffle(pages)
        commands: list[wire.Command] = [
            wire.OpenSpace(
                space=space,
                op=self.number(),
                tenant=random.choice("ab"),
                priority=random.choice([0, 0, 1]),
                tenant_pages=random.choice([None, 12]),
            ),
            wire.OpenQueue(space=space, queue=1, op=self.number()),
            wire.AllocPages(space=space, queue=1, op=self.number(), first=1, count=count),
            wire.AllocEmbeds(space=space, queue=1, op=self.number(), first=1, count=4),
        ]
        self.driver.send(*commands)
        self.loops[space] = Loop(space, pages, [])

    def feed(self, loop: Loop) -> None:
        """Embed, forward and ask what is next, without waiting in between."""
        random = self.driver.random
        room = len(loop.pages) * self.driver.worker.spec.page_size - len(loop.tokens)
        if room == 0:
            return
        tokens = self.driver.text(min(4, room) + 1)
        embeds = _u32(*range(1, len(tokens) + 1))
        start = len(loop.tokens)
        positions = struct.pack(f"<{len(tokens)}i", *range(start, start + len(tokens)))
        pages = _u32(*loop.pages)
        loop.tokens += tokens
        common = {"space": loop.space, "queue": 1}
        if random.random() < 0.5:
            op = self.number()
            self.driver.send(
                wire.EmbedText(
                    **common, op=self.number(), tokens=pack_tokens(tokens), positions=positions, embeds=embeds
                ),
                wire.Forward(**common, op=self.number(), read=pages, inputs=embeds, write=pages, outputs=_u32(1)),
                wire.NextDist(**common, op=op, k=3, embeds=_u32(1)),
            )
        else:
            op = self.number()
            self.driver.send(
                wire.ForwardSample(
                    **common, op=op, read=pages, tokens=pack_tokens(tokens), positions=positions, write=pages
                )
            )
        loop.waiting = op

    def wait(self, loop: Loop) -> None:
        """Wait for something other than the device, once its commands are done, most of the time for a while."""
        random = self.driver.random
        kind, expected_in_s = random.choice([("http", None), ("sleep", 0.4), ("message", None)])
        self.driver.send(wire.ExpectSpace(space=loop.space, kind=kind, expected_in_s=expected_in_s))
        loop.rests = random.choice([0, 5, 15])

    def export(self, loop: Loop) -> None:
        """Hand the pages to another space, which goes on with a copy."""
        child, name = self.number(), f"of {loop.space}"
        self.driver.send(
            wire.ExportPages(space=loop.space, queue=1, op=self.number(), pages=_u32(*loop.pages), name=name),
            wire.OpenSpace(space=child, op=self.number()),
            wire.OpenQueue(space=child, queue=1, op=self.number()),
            wire.ImportPages(space=child, queue=1, op=self.number(), first=1, name=name),
            wire.AllocEmbeds(space=child, queue=1, op=self.number(), first=1, count=4),
        )
        # Exported in the order of the parent's pages.
        self.loops[child] = Loop(child, list(range(1, len(loop.pages) + 1)), list(loop.tokens))

    def close(self, space: int) -> None:
        self.driver.send(wire.CloseSpace(space=space))
        self.driver.engine.publish(0)
        del self.loops[space]

    def nonsense(self, loop: Loop) -> None:
        common = {"space": loop.space, "queue": 1, "op": self.number()}
        self.driver.send(
            self.driver.random.choice(
                [
                    wire.FreePages(**common, pages=_u32(999)),
                    wire.Forward(**common, read=_u32(999), inputs=_u32(1), write=_u32(1)),
                    wire.CopyTokens(**common, source=1, source_offset=99, target=1, target_offset=0, count=1),
                    wire.NextDist(**common, k=0, embeds=_u32(1)),
                ]
            )
        )

    def read(self) -> None:
        """Compare what came with what the tokens alone give."""
        driver = self.driver
        for event in driver.others:
            for loop in self.loops.values():
                if getattr(event, "op", None) != loop.waiting or loop.waiting is None:
                    continue
                loop.waiting = None
                if isinstance(event, wire.Failed):
                    assert event.error.kind in ("out_of_pages", "unknown_handle", "invalid_request"), event
                    loop.tokens = []
                    loop.pages = []
                elif event.dists is not None:
                    self.compared += 1
                    first = event.dists.ids[0]
                    assert first == most_likely(loop.tokens, driver.vocab)
        driver.others.clear()


def _u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_device_pages": 40, "num_slots": 8, "max_running": 4, "max_context": 320},
        {"num_device_pages": 40, "num_slots": 8, "max_running": 4, "max_context": 320, "num_host_pages": 16},
        {
            "num_device_pages": 40,
            "num_slots": 8,
            "max_running": 4,
            "max_context": 320,
            "num_host_pages": 24,
            "intercept": make_policy("swap"),
        },
        {"num_device_pages": 60, "num_slots": 20, "max_running": 16, "max_context": 320, "max_step_tokens": 24},
        {"num_device_pages": 400, "num_slots": 40, "max_running": 32},
    ],
    ids=["tight", "tiers", "swapping", "small-steps", "roomy"],
)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 8))])
def test_random_spaces(seed: int, sizes: dict[str, object], overlap: bool) -> None:
    driver = Driver(seed, overlap=overlap, lenient=True, num_embed_slots=24, **sizes)
    clients = Clients(driver)
    for _ in range(250):
        if driver.random.random() < 0.7:
            clients.act()
        elif len(driver.sequences) < 6:
            driver.generate(driver.open(), driver.random.randrange(1, 30))
        else:
            number = driver.random.choice(list(driver.sequences))
            driver.send(wire.Release(seq=number))
            driver.engine.publish(0)
            del driver.sequences[number]
        if driver.random.random() < 0.8:
            driver.step()
        else:
            driver.engine.advance()
            driver.engine.publish(0)
            driver.check()
        driver.clock.advance(0.05)
        clients.read()
    for space in list(clients.loops):
        clients.close(space)
    driver.finish()
    assert driver.engine.scheduler.spaces.num_pages == 0
    assert not driver.engine.scheduler.spaces._pool.held
    assert clients.compared > 12
