"""Carries out what a run asks for, on an event loop: calls of models and functions, with bounded concurrency.

Owns the tasks in progress. All decisions are `RunState`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import Unsupported, WeftError
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.graph.values import RowError, split_ranges, text_of
from weft.workflow.run.allowance import bound_of
from weft.workflow.run.backend import NOTHING_KNOWN, BoundsCalls, KnowsTokens, ModelBackend, NamesModels
from weft.workflow.run.calls import CallBound, CallTimes, ModelAnswer, ModelRequest, PromptFound
from weft.workflow.run.clock import RunClock
from weft.workflow.run.feed import RunFeed
from weft.workflow.run.functions import (
    FUNCTION_TIMEOUT_S,
    called_function,
    checked_value,
    no_value_within,
    time_limit,
)
from weft.workflow.run.instructions import (
    AwaitExternal,
    CallFunction,
    CallModel,
    FeedChanged,
    FindCost,
    Instruction,
    Notice,
    RowDone,
    RunProgram,
    TaskName,
)
from weft.workflow.run.journal import RunJournal
from weft.workflow.run.keeper import KeepsPrefixes, PrefixKeeper
from weft.workflow.run.known_statistics import KnownStatistics
from weft.workflow.run.planning import RunPlanner
from weft.workflow.run.prompt_cache import PromptCache
from weft.workflow.run.refusals import refusal
from weft.workflow.run.row_reader import NumberedRow, RowReader
from weft.workflow.run.slots import RowSlots
from weft.workflow.run.state import RunState


class Concurrency(NamedTuple):
    """How much of a run is in progress at once."""

    rows: int = 1000
    """Rows whose values are kept. Rows of one plan group should fit."""
    calls: int = 256
    """Calls at one engine; at the model's server, where its engines are not known."""
    waiting_calls: int = 10
    """Of those, calls that an engine has not begun. While so many wait, no call begins a conversation, so that the
    order of the plan is the engine's order; calls that go on with one are sent in any case (`ReadyCalls`)."""
    functions: int = 16
    """Functions and programs, those of the earliest rows first."""

    def on(self, num_engines: int) -> Concurrency:
        """The calls of all engines of a model together."""
        return self._replace(calls=self.calls * num_engines, waiting_calls=self.waiting_calls * num_engines)


class RunServices(NamedTuple):
    """What a run may use."""

    backend: ModelBackend
    functions: Mapping[str, Callable[..., Any]] = {}
    """Plain functions run in threads, coroutine functions on the loop."""
    program: Callable[[RunProgram], Awaitable[Any]] | None = None
    """Runs an uploaded program."""
    source: Callable[[CallFunction], Awaitable[Any]] | None = None
    """Runs the source of a function, within limits of its own."""
    external: Callable[[AwaitExternal], Awaitable[Any]] | None = None
    """Gives the value of an `external` node."""
    elsewhere: Callable[[CallFunction], Awaitable[Any]] | None = None
    """Calls a function that is not among `functions`, without a limit of time."""
    function_timeout_s: float = FUNCTION_TIMEOUT_S
    on_answer: Callable[[ModelAnswer], None] = lambda answer: None
    """Told each answer of a call that was made, or that the cache had, now."""
    cache: PromptCache | None = None
    """For calls whose nodes may have an earlier answer."""
    statistics: Callable[[WorkflowGraph], KnownStatistics] | None = None
    """What earlier runs measured of a graph's nodes."""


Asked = CallModel | CallFunction | RunProgram | AwaitExternal
Report = Callable[[], None]
"""Tells the state how a task ended."""
Turn = Callable[[], Awaitable[None]]
"""Lets other tasks of the event loop run, then returns."""


async def next_pass() -> None:
    """A `Turn` after which all that is ready has run once."""
    await asyncio.sleep(0)


class Driver:
    """One run. Iterate over `results`; closing the iterator cancels what is in progress."""

    def __init__(
        self,
        state: RunState,
        rows: Iterator[NumberedRow] | AsyncIterator[NumberedRow],
        services: RunServices,
        concurrency: Concurrency | None = None,
        journal: RunJournal | None = None,
        planner: RunPlanner | None = None,
        feed: RunFeed | None = None,
        turn: Turn = next_pass,
        ends_on: tuple[type[WeftError], ...] = (),
    ):
        """`rows` are numbered, and closed at the end; an iterator that may take long must be a `RowReader`. What the
        `journal` has of them is not done again. The `planner` must have been made with the order of the state; the
        prefixes that it pins are kept as far as the backend can. The `feed` is told texts and starts of calls. `turn`
        is awaited between turns of evaluation. Errors of the backend that `ends_on` names end the run; others are of
        their row."""
        self._state = state
        self._rows = rows
        self._journal = journal
        self._planner = planner
        self.feed = feed or RunFeed()
        self._turn = turn
        self._ends_on = ends_on
        self._services = services
        self._at_once = (concurrency or Concurrency()).on(1 if planner is None else planner.num_engines)
        self._reports: asyncio.Queue[Report] = asyncio.Queue()
        self._running: set[asyncio.Task[None]] = set()
        self._functions = RowSlots(self._at_once.functions)
        self._counting = asyncio.Semaphore(self._at_once.functions)
        self._num_calls = 0
        self._num_waiting = 0
        self._is_open = True
        self._is_ending = False
        self._is_time_over = False
        self._is_rest_failed = False
        self._clock = RunClock(state, journal, self._end_time)
        self._has_news = False
        self._keeper: PrefixKeeper | None = None
        backend = services.backend
        if planner is not None and planner.settings.pins and isinstance(backend, KeepsPrefixes):
            self._keeper = PrefixKeeper(planner.rounds, state, backend)
        if journal is not None:
            state.go_on(journal.answered, journal.seconds)

    def wake(self) -> None:
        """The state was changed from outside: look at it again."""
        self._reports.put_nowait(lambda: None)

    def announce(self) -> None:
        """The results are to have a `FeedChanged`."""
        self._has_news = True
        self.wake()

    async def results(self) -> AsyncGenerator[Notice, None]:
        """Rows as they end, in no order; of a graph that grows, nodes as they settle."""
        try:
            self._clock.start()
            while True:
                await self._open_rows()
                await self._evaluate()
                if self._planner is not None and (self._state.num_opened or not self._is_open):
                    await self._planner.advance(self._state, is_open=self._is_open)
                next_try_s = self._state.wake(self._now())
                for instruction in self._state.take(*self._room()):
                    if isinstance(instruction, Notice):
                        if isinstance(instruction, RowDone):
                            self.feed.end_row(instruction.row)
                            self._row_ended(instruction)
                        yield instruction
                    else:
                        self._start(instruction)
                if self._has_news:
                    self._has_news = False
                    yield FeedChanged()
                if not self._is_open and not self._state.num_rows:
                    return
                await self._next_reports(next_try_s)
        finally:
            self._is_ending = True
            self._clock.stop()
            if self._keeper is not None:
                self._keeper.close()
            if not self._is_time_over:  # a second cancellation would interrupt what tasks do after the first one
                self._cancel_all()
            await asyncio.gather(*self._running, return_exceptions=True)
            if self._planner is not None:
                await self._planner.close()
            if self._keeper is not None:
                self._keeper.close()
            if isinstance(self._rows, AsyncGenerator):
                await self._rows.aclose()  # what it has open would wait for the garbage collector
            if isinstance(self._rows, RowReader):
                self._rows.close()
            self._state.close()

    def _end_time(self) -> None:
        """The seconds of the run have passed: no task begins or reports from now on."""
        self._is_time_over = True
        self._cancel_all()
        self.wake()

    def _cancel_all(self) -> None:
        for task in self._running:
            task.cancel()

    async def _evaluate(self) -> None:
        """Evaluate all that can be, in turns with the other tasks of the event loop."""
        self._fail_rest()
        while self._state.work():
            await self._turn()
            self._state.begin_turn()
            self._fail_rest()

    def _fail_rest(self) -> None:
        """Where the seconds of the run have passed, fail what has no value, once."""
        if self._is_time_over and not self._is_rest_failed:
            self._is_rest_failed = True
            self._report_all()  # what was given in time counts
            self._state.time_over()

    @property
    def _may_open(self) -> bool:
        if isinstance(self._rows, RowReader) and self._rows.is_waiting:
            return False
        return self._is_open and self._state.num_rows < self._at_once.rows and self._state.has_room

    def _row_ended(self, notice: RowDone) -> None:
        if self._keeper is not None:
            self._keeper.has_ended(notice.row)

    async def _open_rows(self) -> None:
        while self._may_open:
            rows = self._rows
            if isinstance(rows, RowReader) and not rows.has_next:
                rows.ask(self._at_once.rows - self._state.num_rows, self.wake)
                return
            found = await anext(rows, None) if isinstance(rows, AsyncIterator) else next(rows, None)
            if found is None:
                self._is_open = False
                return
            self._state.open_row(*found)
            await self._evaluate()

    def _room(self) -> tuple[int, int]:
        """How many calls may be sent, and how many of them may begin a conversation."""
        return self._at_once.calls - self._num_calls, self._at_once.waiting_calls - self._num_waiting

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _next_reports(self, next_try_s: float | None) -> None:
        """Wait for something to report, and report all there is. Returns at once while rows have ended."""
        if self._state.has_instructions or self._state.has_work or self._may_open:
            return
        max_calls, max_new = self._room()
        if max_calls > 0 and self._state.has_next(max_new):
            return
        pause = None if next_try_s is None else max(next_try_s - self._now(), 0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                (await self._reports.get())()
        self._report_all()

    def _report_all(self) -> None:
        while not self._reports.empty():
            self._reports.get_nowait()()

    def _start(self, instruction: Instruction) -> None:
        assert not isinstance(instruction, Notice)
        if self._is_time_over:
            return
        known = msgspec.UNSET if self._journal is None else self._journal.take(instruction.task)
        if known is not msgspec.UNSET:
            self._reports.put_nowait(lambda: self._report(instruction.task, known))
            return
        if isinstance(instruction, FindCost):
            work = self._find_cost(instruction)
        elif isinstance(instruction, CallModel):
            self._num_calls += 1
            self._num_waiting += 1
            work = self._call(instruction)
        else:
            work = self._finish(instruction, partial(self._value, instruction))
        self._begin(instruction.task, work)

    def _begin(self, name: TaskName, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(partial(self._done, name))

    def _done(self, name: TaskName, task: asyncio.Task[None]) -> None:
        """Errors of values are reported; what else ends a task, such as an error of the journal, ends the run."""
        self._running.discard(task)
        if not task.cancelled():
            if task.exception() is not None:
                self._reports.put_nowait(task.result)
        elif not self._is_ending:
            # Not by this object: without a report the row would never end.
            error = RowError("it was cancelled from within")
            self._tell(lambda: self._state.failed(name, error, self._now()))

    def _tell(self, report: Report) -> None:
        """Report how a task ended, unless the run has cancelled it because of the time."""
        if not self._is_time_over:
            self._reports.put_nowait(report)

    async def _find_cost(self, asked: FindCost) -> None:
        call, bound = asked.call, None
        async with self._counting:
            found = await self._cached(await self._cache_key(call))
            if found is None and asked.counts_tokens:
                bound = await self._bound(call.request)
        if found is None:
            self._tell(lambda: self._state.counted(call.task, bound))
            return
        self._services.on_answer(found)
        self._give(call.task, found)

    async def _bound(self, request: ModelRequest) -> CallBound:
        """The most tokens that a request may use."""
        backend, bound = self._services.backend, None
        if isinstance(backend, BoundsCalls):
            with suppress(WeftError):  # the call itself will say why
                bound = await backend.call_bound(request)
        return bound or bound_of(request, None)

    async def _call(self, call: CallModel) -> None:
        progress = _Progress(self, call)
        try:
            await self._finish(call, partial(self._complete, call, progress))
        finally:
            progress.end()
            self._num_calls -= 1

    def begun(self) -> None:
        """A call no longer waits at the model's server."""
        self._num_waiting -= 1
        self.wake()

    def has_prompt(self, call: CallModel) -> None:
        """The KV of a call's prompt is there."""
        if self._keeper is not None:
            self._keeper.has_started(call)

    def said(self, call: CallModel, piece: str) -> None:
        """A call has given a further piece of its text."""
        if not self._is_time_over:
            self.feed.piece(self._state.answered_by(call.task), piece)

    async def _complete(self, call: CallModel, progress: _Progress) -> ModelAnswer:
        begun_with = [] if self._keeper is None else self._keeper.begins_with(call)
        found = await self._answer(call, progress)
        if self._keeper is not None:
            self._keeper.was_answered(begun_with, found)
        found = found._replace(times=CallTimes() if found.is_cached else progress.times())
        self._services.on_answer(found)
        return found

    async def _answer(self, call: CallModel, progress: _Progress) -> ModelAnswer:
        make = partial(self._services.backend.complete, progress.request, progress)
        key, cache = await self._cache_key(call), self._services.cache
        return await make() if cache is None or key is None else await cache.answer(key, make, progress.waits)

    async def _cache_key(self, call: CallModel) -> str | None:
        """Under which the prompt cache has the answer of a call; None: it has none of such calls."""
        backend, key = self._services.backend, call.request.key
        if self._services.cache is None or key is None or not call.may_be_cached:
            return None
        if isinstance(backend, KnowsTokens):
            # A template may write other tokens for the same messages: today's date, for example.
            with suppress(WeftError):  # the call itself will say why
                key = f"{key} {await backend.prompt_digest(call.request)}"
        if isinstance(backend, NamesModels):
            try:
                key = f"{key} {await backend.model_of(call.request)}"
            except WeftError:  # the call itself will say why
                return None
        return key

    async def _cached(self, key: str | None) -> ModelAnswer | None:
        cache = self._services.cache
        return None if cache is None or key is None else await cache.get(key)

    async def _finish(self, instruction: Asked, work: Callable[[], Awaitable[Any]]) -> None:
        """Wait for what a task gives, and report it."""
        try:
            value = await work()
        except Exception as raised:
            if _asks_model(instruction) and isinstance(raised, self._ends_on):
                raise
            error = raised
            self._tell(lambda: self._state.failed(instruction.task, error, self._now()))
            return
        self._give(instruction.task, value)

    def _give(self, task: TaskName, value: Any) -> None:
        """Keep and report what a task has given."""
        if self._journal is not None and not self._is_time_over:
            self._journal.keep(task, value)
        self._tell(lambda: self._report(task, value))

    def _keep_equal(self, task: TaskName, names: list[TaskName], answer: ModelAnswer) -> None:
        """Keep an answer for the other calls that have it: the row of the one that was sent may end first, and then
        the journal has nothing of its tasks. For them it costs nothing."""
        if self._journal is not None:
            for name in names:
                if name != task and name.row in self._state.rows:
                    self._journal.keep(name, answer.again)

    def _report(self, task: TaskName, value: Any) -> None:
        if isinstance(value, ModelAnswer):
            names = self._state.answered_by(task)
            if self.feed.has_text(task.path):
                self.feed.finish(names, value.text)
            self._keep_equal(task, names, value)
            self._state.answered(task, value)
        else:
            self._state.returned(task, value)

    async def _value(self, instruction: CallFunction | RunProgram | AwaitExternal) -> Any:
        services = self._services
        match instruction:
            case CallFunction(node=node, args=args) if node.name == "split":
                text = text_of(args["text"])
                parts = await services.backend.split(text, lambda ends, is_cut: split_ranges(args, ends, node, is_cut))
                return checked_value(parts)
            case CallFunction(node=node, args=args):
                if node.source is not None and services.source is None:
                    raise Unsupported(refusal(node))
                async with self._functions.of(instruction.task.row):
                    if node.source is not None and services.source is not None:
                        return checked_value(await services.source(instruction))
                    if services.elsewhere is not None and node.name not in services.functions:
                        return checked_value(await services.elsewhere(instruction))
                    seconds = services.function_timeout_s
                    return await called_function(services.functions, node.name or "", args, seconds)
            case RunProgram(node=node):
                if services.program is None:
                    raise Unsupported(refusal(node))
                async with self._functions.of(instruction.task.row):
                    return checked_value(await services.program(instruction))
            case AwaitExternal(node=node):
                if services.external is None:
                    raise Unsupported(refusal(node))
                async with time_limit(node.timeout_s, no_value_within(node.timeout_s)):
                    return checked_value(await services.external(instruction))


def _asks_model(instruction: Asked) -> bool:
    """Whether the backend is asked; functions of Python may run workflows of their own."""
    is_split = isinstance(instruction, CallFunction) and instruction.node.name == "split"
    return is_split or isinstance(instruction, CallModel)


class _Progress:
    """`CallProgress` of one try of a call."""

    def __init__(self, driver: Driver, call: CallModel):
        self._driver = driver
        self._call = call
        self._sent_s = time.time()
        self._started_s = 0.0
        self._has_begun = False
        self.wants_text = driver.feed.has_text(call.task.path)
        self.request = call.request
        if self.wants_text:
            driver.feed.begin(*call.task)
            if call.request.key is None:
                # Another try, also after an interruption of the run, is to draw the text of which a part was told.
                seed = int.from_bytes(hashlib.sha256(f"{driver.feed.name} {call.task}".encode()).digest()[:4], "big")
                self.request = call.request._replace(hints={**call.request.hints, "seed": seed})

    def __call__(self, start: PromptFound = NOTHING_KNOWN) -> None:
        if not self._started_s:
            self._started_s = time.time()
            self._driver.feed.started(*self._call.task, start, self._started_s)
            self._begun()

    def waits(self) -> None:
        """An equal call of another run is in flight, so this one does not wait at the model's server."""
        self._begun()

    def _begun(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._driver.begun()

    def first_token(self) -> None:
        """As `CallProgress.first_token`."""
        self._driver.has_prompt(self._call)

    def text(self, piece: str) -> None:
        """As `CallProgress.text`."""
        if self.wants_text:
            self._driver.said(self._call, piece)

    def end(self) -> None:
        """The try is over, also where the model never began with it."""
        self._started_s = self._started_s or time.time()
        self._begun()

    def times(self) -> CallTimes:
        """Of a call that was answered now."""
        now_s = time.time()
        return CallTimes(self._sent_s, self._started_s or now_s, now_s)
