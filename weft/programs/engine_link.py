"""`EngineLink`: the way of commands to one engine, and of its events to the operations that wait for them.

Owns the numbers of sequences, spaces and operations, the queue of commands of the current event-loop turn (one `send` a
turn), and one dictionary lookup for each event. It knows sequences and spaces as `EngineHandle` alone.
`weft.programs.runtime` is built on it. Used from one event loop only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Protocol

from weft.abi.errors import EngineDead, InvalidRequest, WeftError
from weft.core.wire import Cancelled, Command, Envelope, Event, Failed, Finished, OperationUsage, Started, Token
from weft.engine.client import EngineClient
from weft.programs.operations import EngineOperation, Report
from weft.programs.retains import DevicePages

logger = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]
NO_HANDLE = 0
"""Of operations that belong to no sequence and no space."""
NOT_READY = "the engine is starting or restarting; try again in a moment"
"""Message of `EngineDead`."""


class EngineHandle(Protocol):
    """A resource on the engine, whose operations end in events."""

    @property
    def id(self) -> int:
        """The number of the resource; its operations carry it."""

    def fail(self, operation: EngineOperation, error: WeftError, usage: OperationUsage) -> None:
        """An operation has failed: end it with this error, or with what the error means here."""

    def ended(self, operation: EngineOperation) -> None:
        """Forget an operation that has ended, and the silent ones that were to run before it."""

    def lose(self, error: WeftError, *, engine_died: bool = False) -> None:
        """The resource is gone: fail everything that waits for it."""


class EngineLink:
    """The only subscriber of an `EngineClient`. `on_event` receives events of no operation (trace spans)."""

    def __init__(self, engine: EngineClient, on_event: OnEvent | None = None):
        self.engine = engine
        self._on_event = on_event
        # Sequences, spaces and operations share one counter: a number in a log is unambiguous.
        self._numbers = itertools.count(1)
        self._operations: dict[int, EngineOperation] = {}
        self._handles: dict[int, EngineHandle] = {}
        self._queue: list[Command] = []
        engine.subscribe(self._on_envelope)

    @property
    def num_operations(self) -> int:
        """Operations that have not ended."""
        return len(self._operations)

    # ---- for handles

    def check_ready(self) -> None:
        """Raise `EngineDead` where the engine is known to be down."""
        if not self.engine.ready:
            raise EngineDead(NOT_READY)

    def number(self) -> int:
        """A number for a handle or an operation; never the same again."""
        return next(self._numbers)

    def post(self, command: Command) -> None:
        """Queue a command. All commands of one turn of the event loop leave as one message."""
        if not self._queue:
            asyncio.get_running_loop().call_soon(self.flush)
        self._queue.append(command)

    def flush(self) -> None:
        """Send what is queued now, instead of at the end of this turn."""
        if not self._queue:
            return
        commands, self._queue = self._queue, []
        try:
            self.engine.send(commands)
        except EngineDead as error:
            self._lose_all(error)
        except Exception:
            # One of them cannot be encoded: it fails alone, since the others may be of other programs.
            for command in commands:
                self._send_alone(command)

    def add_handle(self, handle: EngineHandle) -> None:
        """Register a sequence or a space."""
        self._handles[handle.id] = handle

    def remove_handle(self, handle: EngineHandle) -> None:
        """Forget a sequence or a space that was given up. Its later events are dropped."""
        self._handles.pop(handle.id, None)

    def add_operation(self, operation: EngineOperation) -> None:
        """Route events of this number to the operation."""
        self._operations[operation.op] = operation

    def remove_operation(self, op: int) -> None:
        """Stop routing events to an operation."""
        self._operations.pop(op, None)

    # ---- for retains of prefixes

    @property
    def pool(self) -> DevicePages:
        """The engine's device pages. Raises `EngineDead` while it does not answer."""
        self.check_ready()
        return DevicePages(self.engine.info.num_device_pages, self.engine.info.page_size)

    def tell(self, op: int, told: Callable[[Finished | WeftError], None]) -> None:
        """Call `told` with the end of an operation that belongs to no handle, and that will be posted."""
        operation = Report(op, NO_HANDLE)
        operation.report_to(_Told(operation, told))
        self.add_operation(operation)

    # ---- inside

    def _send_alone(self, command: Command) -> None:
        try:
            self.engine.send([command])
        except EngineDead as error:
            self._lose_all(error)
        except Exception as error:
            logger.exception("a command cannot be sent: %s", type(command).__name__)
            op = getattr(command, "op", 0)
            refused = InvalidRequest(f"the command cannot be encoded for the engine: {error}")
            self._on_envelope(Envelope(0, [Failed.of(op, refused)]))

    def _on_envelope(self, envelope: Envelope) -> None:
        """Hand each event to its operation; wake each waiting task once, after the last of them."""
        operations = self._operations
        touched: list[EngineOperation] = []
        dead: WeftError | None = None
        for event in envelope.events:
            # By far the most frequent, hence first and with nothing in its way.
            if type(event) is Token:
                operation = operations.get(event.op)
                if operation is not None and operation.put(event):
                    touched.append(operation)
            elif isinstance(event, Finished | Failed | Cancelled):
                if isinstance(event, Failed) and event.error.kind == EngineDead.kind:
                    dead = event.error.error()
                operation = operations.pop(event.op, None)
                if operation is not None:
                    touched.append(operation)
                    try:
                        self._end(operation, event)
                    except Exception as error:
                        # The events behind it are of other programs too.
                        logger.exception("the end of operation %d was not carried out", event.op)
                        operation.fail(WeftError(f"the end of the operation could not be carried out: {error!r}"))
                elif isinstance(event, Failed) and event.op > 0:
                    # A late event of an operation that was given up: its program no longer waits for it.
                    logger.debug("operation %d failed after its end: %s", event.op, event.error)
            elif isinstance(event, Started):
                operation = operations.get(event.op)
                if operation is not None:
                    operation.begin(event)
            elif self._on_event is not None:
                self._on_event(event)
        if dead is not None:
            # Handles without an operation under way are gone too, and no event of their own says so.
            self._lose_all(dead)
        for operation in touched:
            operation.wake()

    def _end(self, operation: EngineOperation, event: Finished | Failed | Cancelled) -> None:
        handle = self._handles.get(operation.handle)
        if isinstance(event, Failed):
            error = event.error.error()
            if handle is None:
                operation.fail(error, event.usage)
            else:
                handle.fail(operation, error, event.usage)
        elif isinstance(event, Finished):
            operation.finish(event)
        else:
            operation.cancel(event.usage)
        if handle is not None:
            handle.ended(operation)

    def _lose_all(self, error: WeftError) -> None:
        """The engine has died, and everything that it held with it. What was queued for it is not sent to another."""
        self._queue.clear()
        for handle in list(self._handles.values()):
            handle.lose(error, engine_died=True)
        for operation in [one for one in self._operations.values() if one.handle not in self._handles]:
            # Of a handle that was given up; its command may have been among those queued.
            self.remove_operation(operation.op)
            operation.fail(error)
            operation.wake()


class _Told:
    """`Wakes`: tells how an operation ended."""

    def __init__(self, operation: Report, told: Callable[[Finished | WeftError], None]):
        self._operation, self._told = operation, told

    def wake(self) -> None:
        """As `Wakes.wake`."""
        end = self._operation.error or self._operation.finished
        if end is not None:
            self._told(end)
