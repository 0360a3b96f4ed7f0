"""A whole engine on a fake worker as an `EngineClient`, one step per turn of the event loop: no thread, no clock."""

import asyncio
from functools import partial

from weft.cache.integrity import check_integrity
from weft.core.clock import ManualClock
from weft.core.wire import Command, Envelope, ResetPrefixCache
from weft.engine.engine import Engine
from weft.engine.request_tracker import TrackingClient
from weft.sched.scheduler import SchedulerConfig
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_worker import FakeWorker, fake_spec

_CLIENT = 1
_STEP_S = 0.05
"""What the clock of the engine moves per turn: a command that waits for pages fails after some turns."""


class SteppedEngine(TrackingClient):
    """`check_empty` says what was left behind."""

    def __init__(self, **spec: object):
        super().__init__(self._deliver)
        tokenizer = byte_tokenizer()
        sizes = {"vocab_size": 264, "num_device_pages": 48, "num_slots": 4, "num_embed_slots": 64, "max_context": 320}
        worker = FakeWorker(fake_spec(**{**sizes, **spec}), lenient=True)
        config = SchedulerConfig(
            max_context=worker.spec.max_context,
            max_running=worker.spec.num_slots,
            max_step_tokens=128,
            vocab_size=worker.spec.vocab_size,
            eos_token_ids=[256],
        )
        self.clock = ManualClock()
        self.engine = Engine(
            worker,
            config,
            lambda client, envelope: self._receive(envelope),
            clock=self.clock,
            token_bytes=[*tokenizer.token_bytes, *[b""] * (worker.spec.vocab_size - tokenizer.vocab_size)],
            special_ids=tokenizer.special_ids,
            encode=partial(tokenizer.encode, add_special_tokens=False),
        )
        self._inbox: list[Command] = []
        self._scheduled = False
        self._requests.begin(self.engine.info)

    async def wait_ready(self) -> object:
        """It always is."""
        return self.info

    async def close(self) -> None:
        """Stop its threads."""
        self.engine.close()

    async def drained(self) -> None:
        """When all that was sent is carried out."""
        while self._scheduled:  # noqa: ASYNC110 (turns of the loop are what it takes)
            await asyncio.sleep(0)

    def check_empty(self) -> None:
        """Raise `AssertionError` for anything that is held, exports and cached prefixes excepted."""
        engine = self.engine
        assert len(engine.scheduler.sequences) == 0, "sequences are left"
        assert len(engine.scheduler.spaces) == 0, "spaces are left"
        assert len(engine.scheduler.sequences.queue) == 0, "sequences are left in the queue"
        assert not engine.scheduler.sequences.without_slot, "idle sequences are left"
        assert engine.scheduler.sequences.slots.num_free == engine.info.max_running, "slots are left"
        self.clock.advance(1e6)
        engine.cache.retention.expire(self.clock.now())
        engine.submit(_CLIENT, [ResetPrefixCache()])
        check_integrity(engine.cache, [], engine.scheduler.spaces.device_pages())
        tiers = engine.cache.tiers
        assert tiers.device.num_free == tiers.device.num_pages, "pages are left"
        assert not engine.cache.trees()
        assert not self._requests._open, "operations are left"

    # ---- inside

    def _receive(self, envelope: Envelope) -> None:
        self._requests.receive(envelope)

    def _deliver(self, commands: list[Command]) -> None:
        self._inbox += commands
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        commands, self._inbox = self._inbox, []
        self.clock.advance(_STEP_S)
        engine = self.engine
        engine.submit(_CLIENT, commands)
        engine.advance()
        engine.publish(0)
        if engine.busy:
            engine.step()
        if engine.busy or engine.compiling or engine.waiting_for_room or self._inbox:
            self._schedule()
