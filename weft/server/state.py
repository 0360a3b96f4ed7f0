"""What the front serves: models by name, and whether the server takes work.

Owns the names, the start and the end of each model's engine client, and the set of running requests. It does not know
HTTP. `weft.server.run` and the tests build it; routes read it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from weft.abi.errors import Draining, EngineDead, WeftError
from weft.config import ServerConfig
from weft.engine.client import EngineClient
from weft.metrics import FrontMetrics, ModelMetrics
from weft.programs.runtime import Runtime
from weft.server.auth import parse_keys
from weft.server.bodies import BodyBudget
from weft.server.dialect import Dialect, dialect_of
from weft.server.errors import HttpProblem
from weft.server.programs import Programs, inline_programs
from weft.server.timer import Timer
from weft.server.traces import Traces
from weft.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("weft.server")

MAX_LISTED_NAMES = 20
_SHRINKING = 4
"""Unicode normalisation may make a text shorter, by less than this factor."""


class ServedModel:
    """One engine and the names that clients may call it. The first name is the one in metrics."""

    def __init__(self, names: list[str], engine: EngineClient, tokenizer: Tokenizer, *, root: str = ""):
        if not names:
            raise ValueError("a served model needs a name")
        self.names = names
        self.engine = engine
        self.tokenizer = tokenizer
        self.root = root.rstrip("/").rpartition("/")[2] or names[0]
        """The name of the model without its folder, which clients are not told."""
        self.created = int(time.time())


class Model:
    """A served model in use: its runtime and its metrics. Used from one event loop."""

    def __init__(
        self, served: ServedModel, traces: Traces, metrics: ModelMetrics, dialect: Dialect, *, config: ServerConfig
    ):
        self.names = served.names
        self.engine = served.engine
        self.tokenizer = served.tokenizer
        self.root = served.root
        self.created = served.created
        self.metrics = metrics
        self.dialect = dialect
        self.longest_token = max(map(len, served.tokenizer.token_bytes), default=1)
        """In bytes: no token stands for more characters."""
        self.was_ready = False
        """Whether the engine has answered since the server started."""
        self._max_text_chars = config.max_text_chars
        self.runtime = Runtime(
            served.engine, served.tokenizer, on_event=traces.on_event, engine_wait_s=config.engine_wait_s
        )

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence. Raises `EngineDead` while the engine starts."""
        return self.engine.info.max_context

    @property
    def longest_prompt(self) -> int:
        """Characters that no prompt of the context's size exceeds. Raises `EngineDead` while the engine starts."""
        return _SHRINKING * self.max_context * self.longest_token

    @property
    def max_text_chars(self) -> int:
        """Characters of the longest text that is tokenized. Raises `EngineDead` while the engine starts."""
        return self.longest_prompt if self._max_text_chars is None else self._max_text_chars


class Service:
    """The state that all routes share: configuration, models, programs and metrics."""

    def __init__(
        self,
        config: ServerConfig,
        models: list[ServedModel],
        timer: Timer | None = None,
        programs: Callable[[Service], Programs] = inline_programs,
    ):
        self.config = config
        self.timer = timer or Timer()
        self.metrics = FrontMetrics()
        self.traces = Traces(config.trace)
        self.models = [
            Model(
                model,
                self.traces,
                self.metrics.model(model.names[0]),
                dialect_of(model.tokenizer, config),
                config=config,
            )
            for model in models
        ]
        self.by_name = {name: model for model in self.models for name in model.names}
        if len(self.by_name) != sum(len(model.names) for model in self.models):
            raise ValueError("two models are served under the same name")
        self.programs = programs(self)
        self.bodies = BodyBudget(config.max_bodies_bytes, len({key.tenant for key in parse_keys(config.api_keys)}))
        """Bytes of request bodies being received."""
        self.draining = False
        self.failure: WeftError | None = None
        """Why an engine could not start at all."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when an engine could not start at all."""
        self.num_active = 0
        """Requests under way that count against the limit."""
        self._interrupts: set[Callable[[Exception], None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._starting: set[asyncio.Task[None]] = set()

    # ---- life

    def start(self) -> None:
        """Begin to wait for every engine, without waiting for any."""
        for model in self.models:
            task = asyncio.create_task(self._wait_ready(model))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        task = asyncio.create_task(self._start_programs())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_programs(self) -> None:
        try:
            await self.programs.begin()
        except WeftError as error:
            logger.error("programs cannot be run: %s", error.message)

    async def _wait_ready(self, model: Model) -> None:
        try:
            info = await model.engine.wait_ready()
        except WeftError as error:
            logger.error("model %s cannot be served: %s", model.names[0], error.message)
            self.failure = error
            self.on_failure()
        else:
            model.was_ready = True
            logger.info("model %s is ready on %s: context %d", model.names[0], info.device, info.max_context)

    async def close(self) -> None:
        """Close the clients of all engines."""
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await self.programs.close()
        for model in self.models:
            await model.engine.close()

    # ---- names

    @property
    def ready(self) -> bool:
        """Whether every engine answers and new work is taken."""
        return not self.draining and all(model.engine.ready for model in self.models)

    def find(self, name: str | None) -> Model:
        """The model of a served name; of no name, where there is only one. Raises `HttpProblem` 404 or 400."""
        if name is None:
            if len(self.models) == 1:
                return self.models[0]
            raise HttpProblem(400, f"model is required; {self._served()}.", param="model")
        model = self.by_name.get(name)
        if model is None:
            message = f"The model {name[:200]!r} is not served here; {self._served()}."
            raise HttpProblem(404, message, code="model_not_found", param="model")
        return model

    def sampling_defaults(self, name: object) -> Mapping[str, float]:
        """Sampling parameters that the model of a served name recommends; none for a name that is not served."""
        if name is None and len(self.models) == 1:
            return self.models[0].tokenizer.sampling_defaults
        model = self.by_name.get(name) if isinstance(name, str) else None
        return {} if model is None else model.tokenizer.sampling_defaults

    def usable(self, name: str | None) -> Model:
        """Like `find`, for a model whose engine answers. Raises `EngineDead` too."""
        model = self.find(name)
        if not model.engine.ready:
            raise EngineDead("the engine is starting or restarting; try again shortly")
        return model

    def recoverable(self, name: str | None) -> Model:
        """Like `usable`, and also for a model whose engine is being restarted, where requests wait for that."""
        model = self.find(name)
        return model if model.was_ready and self.config.engine_wait_s else self.usable(name)

    def _served(self) -> str:
        names = sorted(self.by_name)
        more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
        return "served: " + ", ".join(names[:MAX_LISTED_NAMES]) + more

    # ---- running requests

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count a request as under way."""
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if self.num_active == 0:
                self._idle.set()

    @contextmanager
    def interruptible(self, interrupt: Callable[[Exception], None]) -> Iterator[None]:
        """While inside, `interrupt_all` calls this with the error that ends the request."""
        self._interrupts.add(interrupt)
        try:
            yield
        finally:
            self._interrupts.discard(interrupt)

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, wait for running requests, and interrupt those that outlast `timeout_s`."""
        self.draining = True
        logger.info("draining: %d requests under way, at most %g s", self.num_active, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self.programs.idle()
                await self._idle.wait()
        except TimeoutError:
            self.interrupt_all()

    def interrupt_all(self) -> None:
        """End every running request with an error that says so, and every run."""
        self.programs.cancel_all("the server shut down before this run was done")
        if self._interrupts:
            logger.warning("interrupting %d requests that outlasted the drain", len(self._interrupts))
        for interrupt in list(self._interrupts):
            interrupt(Draining("The server shut down before this request was done; send it again."))
