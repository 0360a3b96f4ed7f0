"""`InlineEngine`: an engine in a thread of this process, for tests, notebooks and the offline API.

It shares the interpreter with its caller, so a busy engine delays the caller's event loop; servers use
`weft.engine.supervisor.ProcessEngine`. An engine that fails is not started again.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.abi.errors import EngineDead, WeftError
from weft.config import EngineConfig
from weft.core.wire import Command, EngineInfo, Envelope
from weft.engine.engine import Engine, Publish
from weft.engine.loop import EngineLoop
from weft.engine.request_tracker import TrackingClient
from weft.worker.memory import usable_cores
from weft.worker.sizing import kernel_environment, kernel_threads

if TYPE_CHECKING:
    from weft.tokenizers.tokenizer import Tokenizer

BuildEngine = Callable[[Publish], Engine]
_CLIENT = 1


class InlineEngine(TrackingClient):
    """Implements `weft.engine.client.EngineClient`. `wait_ready` starts the thread."""

    def __init__(self, build: BuildEngine):
        self._build = build
        self._inbox: queue.SimpleQueue[list[Command] | None] = queue.SimpleQueue()
        super().__init__(self._deliver_commands)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._stopped = False
        self.engine: Engine | None = None
        """The engine itself, for tests and notebooks; None until its model is loaded."""

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        trace: bool = False,
    ) -> InlineEngine:
        """An engine that loads the configured model when it is first waited for. `tokenizer`: the model's, if it is
        loaded already."""

        def build(publish: Publish) -> Engine:
            if "torch" not in sys.modules:
                os.environ.update(kernel_environment(kernel_threads(config.threads, usable_cores())) | os.environ)
            from weft.engine.build import build_engine  # imports torch, whose threads read the environment when loaded

            return build_engine(config, publish, progress, tokenizer=tokenizer, trace=trace)

        return cls(build)

    async def wait_ready(self) -> EngineInfo:
        """Start the thread and wait until the model is loaded. Raises what loading raised, and `EngineDead` once the
        engine has failed or was closed."""
        if self._started is None:
            if self._stopped:
                raise EngineDead("the engine was closed; start another one")
            self._loop = asyncio.get_running_loop()
            self._started = self._loop.create_future()
            self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
            self._thread.start()
        await asyncio.shield(self._started)
        return await self._requests.until_ready()

    async def close(self) -> None:
        """Stop the thread and free the model. Idempotent."""
        self._stopped = True
        self._inbox.put(None)
        if self._thread is not None and self._thread.is_alive():
            # Not in an executor of the loop: those refuse work once the interpreter is ending.
            joined = asyncio.Event()
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._join, args=(loop, joined), daemon=True).start()
            await joined.wait()
        self._requests.close(EngineDead("the engine was closed; start another one"))

    # The mailbox, called from the engine's thread

    @property
    def stopped(self) -> bool:
        """Whether the thread should end."""
        return self._stopped

    def receive(self, wait_s: float) -> list[tuple[int, list[Command]]]:
        """Messages of the one client."""
        messages: list[tuple[int, list[Command]]] = []
        try:
            first = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            while True:
                if first is not None:
                    messages.append((_CLIENT, first))
                first = self._inbox.get_nowait()
        except queue.Empty:
            return messages

    def send_envelope(self, client: int, envelope: Envelope) -> None:
        """Hand an envelope to the event loop."""
        self._call(self._requests.receive, envelope)

    # Inside

    def _deliver_commands(self, commands: list[Command]) -> None:
        self._inbox.put(commands)

    def _run(self) -> None:
        """The engine's thread."""
        engine = None
        try:
            engine = self._build(self.send_envelope)
            self.engine = engine
            self._call(self._begin, engine.info)
            EngineLoop(engine, _InlineMailbox(self), lease_s=math.inf).run()
        except Exception as error:  # every error of the engine ends all operations
            self._call(self._end, error)
        finally:
            if engine is not None:
                engine.close()

    def _join(self, loop: asyncio.AbstractEventLoop, joined: asyncio.Event) -> None:
        if self._thread is not None:
            self._thread.join()
        loop.call_soon_threadsafe(joined.set)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *args)

    def _begin(self, info: EngineInfo) -> None:
        self._requests.begin(info)
        if self._started is not None and not self._started.done():
            self._started.set_result(info)

    def _end(self, error: Exception) -> None:
        dead = (
            error
            if isinstance(error, WeftError)
            else EngineDead(f"the engine failed with {type(error).__name__}: {error}; start another one")
        )
        if self._started is not None and not self._started.done():
            self._started.set_exception(dead)
        self._requests.close(EngineDead(dead.message))


class _InlineMailbox:
    """`InlineEngine` as its engine's thread sees it."""

    def __init__(self, owner: InlineEngine):
        self._owner = owner

    @property
    def stopped(self) -> bool:
        return self._owner.stopped

    def receive(self, wait_s: float) -> list[tuple[int, list[Command]]]:
        return self._owner.receive(wait_s)

    def send(self, client: int, envelope: Envelope) -> None:
        self._owner.send_envelope(client, envelope)
