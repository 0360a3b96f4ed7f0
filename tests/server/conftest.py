"""A real uvicorn on loopback, in a thread, over a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import httpx
import msgspec
import openai
import pytest

from weft.config import ProgramsConfig, ServerConfig
from weft.endpoints.models import Models, ServedModel
from weft.programs.run_records import RunRecords
from weft.server.app import App, create_app
from weft.server.programs import inline_programs
from weft.server.run import Server
from weft.server.state import Service
from weft.server.timer import Timer
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.tokenizers.tokenizer import Tokenizer
from weft.workflow.service.service import WorkflowService

T = TypeVar("T")
MODEL = "fake-model"


class _SignallingServer(Server):
    def __init__(self, app: App, config: ServerConfig):
        super().__init__(app, config)
        self.up = threading.Event()
        self.loop: asyncio.AbstractEventLoop

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.bound_port = self.servers[0].sockets[0].getsockname()[1]
        self.up.set()


class ManualTimer(Timer):
    """Time that passes when told to, on the server's loop."""

    def __init__(self) -> None:
        self.sleepers: dict[asyncio.Future[None], float] = {}
        """And when each wakes."""
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self.sleepers[future] = self._now + seconds
        try:
            await future
        finally:
            self.sleepers.pop(future, None)

    def advance(self, seconds: float) -> None:
        self._now += seconds
        for future, due in list(self.sleepers.items()):
            if due <= self._now:
                del self.sleepers[future]
                future.set_result(None)


class RunningServer:
    """A server in its own thread. `on_loop` runs something where engine and service live."""

    def __init__(self, app: App, engine: FakeEngine, config: ServerConfig):
        self.app, self.service, self.engine = app, app.service, engine
        self.runtime = app.service.models[0].runtime
        self.server = _SignallingServer(app, config)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        assert self.server.up.wait(30)
        self.port = self.server.bound_port
        self.url = f"http://127.0.0.1:{self.port}"

    def on_loop(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.server.loop).result(30)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let the server's loop turn until the condition holds there. Bounded by turns and by the test's own limit."""

        async def run() -> None:
            while not condition():  # noqa: ASYNC110  the condition is of code that has no event to wait for
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(run(), self.server.loop).result(60)

    def assert_nothing_left(self) -> None:
        self.wait_until(lambda: not self.engine.sequences and not self.service.num_active)
        assert self.runtime.num_sequences == 0
        assert self.runtime.num_operations == 0

    def http(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def openai(self, **options) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0} | options
        return openai.OpenAI(base_url=self.url + "/v1", timeout=60, **options)

    def async_openai(self, **options) -> openai.AsyncOpenAI:
        options = {"api_key": "none", "max_retries": 0} | options
        return openai.AsyncOpenAI(base_url=self.url + "/v1", timeout=60, **options)

    def post(self, path: str, body: object, **options) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body, **options)

    def chat(self, **fields) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields
        return self.post("/v1/chat/completions", body)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.server.loop.call_soon_threadsafe(self.server.begin_drain)
        self.join()

    def join(self) -> None:
        """Wait for the server's end."""
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def running(
    *,
    auto: bool = True,
    engine: FakeEngine | None = None,
    tokenizer: Tokenizer | None = None,
    names: list[str] | None = None,
    timer: Timer | None = None,
    programs: ProgramsConfig | None = None,
    records: RunRecords | None = None,
    workflows: Callable[[Models], WorkflowService] = WorkflowService,
    more_engines: Sequence[FakeEngine] = (),
    max_waiting: int | None = None,
    **settings,
) -> Iterator[RunningServer]:
    config = msgspec.structs.replace(ServerConfig(port=0, drain_s=5.0), **settings)
    engine = engine or FakeEngine(auto=auto)
    served = ServedModel(
        names or [MODEL],
        engine,
        tokenizer or byte_tokenizer(),
        root="/somewhere/private/" + MODEL,
        more_engines=more_engines,
        max_waiting=max_waiting,
    )
    service = Service(
        config, [served], timer, lambda models: inline_programs(models, programs, records), workflows=workflows
    )
    server = RunningServer(create_app(config, service), engine, config)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """One server for all tests that only send requests; afterwards nothing may be left open."""
    yield shared_server
    shared_server.assert_nothing_left()


@pytest.fixture
def stepped() -> Iterator[RunningServer]:
    """A server whose engine moves only when told to."""
    with running(auto=False) as server:
        yield server


@pytest.fixture
def impatient() -> Iterator[RunningServer]:
    """As `stepped`; requests fail with their engine."""
    with running(auto=False, engine_wait_s=0.0) as server:
        yield server


def sse(text: str) -> list[str]:
    """The data of each event."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def ids(text: str) -> list[int]:
    """Tokens of the byte tokenizer."""
    return list(text.encode())
