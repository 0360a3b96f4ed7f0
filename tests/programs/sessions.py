"""What tests of sessions share: a program that speaks the wire by hand, and a host around it."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from tests.programs.help import settle
from weft.abi.errors import InvalidRequest, WeftError
from weft.abi.frames import EventFrame, EventKind, events, pack
from weft.abi.operations import Op
from weft.config import ProgramsConfig
from weft.programs.network.client import Network
from weft.programs.quota.accounts import Accounts
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.limits import Limits
from weft.programs.run.context import RunContext
from weft.programs.run.messages import Hub
from weft.programs.run.model import ProgramModel
from weft.programs.run.services import ChildSpec, Services
from weft.programs.runtime import Runtime
from weft.programs.types import Caller
from weft.store.values import MemoryValueStore
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine

CALLER = Caller(request_id="r", tenant="t", namespace="n", priority=2)


class FakeOutlet:
    """Remembers what a run said."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.logs: list[tuple[int, str]] = []
        self.ended: list[WeftError] = []
        self.cpu_s = 0.0

    def charge(self, cpu_s: float) -> None:
        self.cpu_s += cpu_s

    def message(self, data: bytes) -> None:
        self.messages.append(data)

    def log(self, level: int, text: str) -> None:
        self.logs.append((level, text))

    def end(self, error: WeftError) -> None:
        self.ended.append(error)


class FakeChild:
    """A run that ends when a test says so."""

    def __init__(self, number: int, spec: ChildSpec, caller: Caller, budget: RunBudget):
        self.id = f"run-{number}"
        self.spec, self.caller, self.budget = spec, caller, budget
        self.killed = 0
        self._result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def finish(self, result: bytes | WeftError) -> None:
        self.budget.close()
        if isinstance(result, WeftError):
            self._result.set_exception(result)
            self._result.exception()
        else:
            self._result.set_result(result)

    @property
    def result_bytes(self) -> int:
        is_there = self._result.done() and self._result.exception() is None
        return len(self._result.result()) if is_there else 0

    async def join(self) -> bytes:
        return await asyncio.shield(self._result)

    def kill(self) -> None:
        self.killed += 1
        if not self._result.done():
            self.finish(WeftError("killed"))


class FakeLauncher:
    """Launches nothing. `gate` holds launches back while it is not set."""

    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def launch(self, spec: ChildSpec, caller: Caller, budget: RunBudget) -> FakeChild:
        await self.gate.wait()
        if spec.program == "missing":
            budget.close()
            raise InvalidRequest("there is no program missing", "program")
        self.children.append(FakeChild(len(self.children) + 1, spec, caller, budget))
        return self.children[-1]


class Program:
    """A guest made of bytes. `session` is its host."""

    def __init__(self, host: "Host", limits: Limits, caller: Caller, reserve_pages: int):
        self.outlet = FakeOutlet()
        self.budget = host.accounts.open(caller.tenant, limits)
        self.session = RunContext(
            host.services, caller=caller, budget=self.budget, outlet=self.outlet, reserve_pages=reserve_pages
        )
        self.seen: list[EventFrame] = []
        self.wakes = 0
        self._numbers = iter(range(1000, 10**9))
        self.session.on_events(self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def say(self, op: Op, *values: float | bytes, call: int = 0) -> None:
        """A command, alone in its message."""
        self.session.commands(pack(op, call, *values))

    def ask(self, op: Op, *values: float | bytes) -> int:
        """A command that answers; its call."""
        call = next(self._numbers)
        self.session.commands(pack(op, call, *values))
        return call

    def look(self) -> None:
        """Take what there is."""
        self.seen += events(self.session.take_events())

    async def end_of(self, call: int) -> EventFrame:
        """The event that a call ends with."""
        async with asyncio.timeout(30):
            while True:
                for event in self.seen:
                    if event.call == call and event.kind != EventKind.PART:
                        return event
                self.seen += events(await self.session.wait_events(None))

    async def result(self, op: Op, *values: float | bytes) -> list[bytes]:
        """The blobs of a result. Fails with the error if there is one."""
        call = self.ask(op, *values)
        event = await self.end_of(call)
        assert event.kind == EventKind.RESULT, event
        return event.blobs

    async def error(self, op: Op, *values: float | bytes) -> tuple[str, str]:
        """EventKind and param of an error."""
        return self.error_in(await self.end_of(self.ask(op, *values)))

    @staticmethod
    def error_in(event: EventFrame) -> tuple[str, str]:
        assert event.kind == EventKind.ERROR, event
        return event.blobs[0].decode(), event.blobs[2].decode()

    async def part(self, call: int) -> list[bytes]:
        """The first part of a call that was not looked at."""
        async with asyncio.timeout(30):
            while True:
                for index, event in enumerate(self.seen):
                    if event.call == call and event.kind == EventKind.PART:
                        del self.seen[index]
                        return event.blobs
                self.seen += events(await self.session.wait_events(None))

    def errors(self, call: int) -> list[str]:
        """Kinds of the errors of a call so far."""
        self.look()
        return [e.blobs[0].decode() for e in self.seen if e.call == call and e.kind == EventKind.ERROR]

    def parts(self, call: int) -> list[list[bytes]]:
        self.look()
        return [event.blobs for event in self.seen if event.call == call and event.kind == EventKind.PART]

    def kinds(self, call: int) -> list[EventKind]:
        self.look()
        return [event.kind for event in self.seen if event.call == call]

    def close(self) -> None:
        self.session.close()
        self.budget.close()


class Host:
    """Everything around sessions. `programs` are closed at the end of a test."""

    def __init__(
        self, engine: FakeEngine, config: ProgramsConfig | None = None, allow: Iterable[str] = (), **network: Any
    ):
        self.engine = engine
        self.rt = Runtime(engine, byte_tokenizer())
        self.accounts = Accounts(config)
        self.launcher = FakeLauncher()
        self.hub = Hub()
        self.store = MemoryValueStore(1 << 20)
        self.model = ProgramModel("fake", self.rt, tool_call_parser="hermes")
        self.services = Services(
            model=self.model,
            models=lambda: [self.model],
            hub=self.hub,
            store=self.store,
            network=Network(allow, **network),
            launcher=self.launcher,
        )
        self.programs: list[Program] = []

    def program(self, limits: Limits | None = None, caller: Caller = CALLER, reserve_pages: int = 0) -> Program:
        self.programs.append(Program(self, limits or Limits(), caller, reserve_pages))
        return self.programs[-1]

    async def close(self) -> None:
        for program in self.programs:
            program.close()
        await self.services.network.close()
        self.model.close()


def run(test: Callable[[Host], Coroutine[Any, Any, None]], *, engine: FakeEngine | None = None, **host: Any) -> None:
    """Run a test; afterwards nothing may be left anywhere."""
    fake = engine or FakeEngine()

    async def body() -> None:
        made = Host(fake, **host)
        try:
            await test(made)
        finally:
            await made.close()
        await settle()
        assert made.rt.num_sequences == 0
        assert made.rt.num_operations == 0
        assert fake.sequences == {}
        assert not made.hub._topics
        assert made.accounts.num_programs == 0
        assert made.accounts.num_pages == 0
        current = asyncio.current_task()
        left = {task for task in asyncio.all_tasks() if task is not current}
        if left:
            # Work on a thread that was given up ends when the thread has come to its end.
            _, left = await asyncio.wait(left, timeout=30)
        assert not left, left

    asyncio.run(body())


def obj(value: object) -> bytes:
    """JSON."""
    return json.dumps(value).encode()
