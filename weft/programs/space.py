"""`Space`: explicit pages and embeddings of one program, from asyncio.

Owns what a program has put on its queues and which of it has not ended. Numbers of queues, pages and embeddings are the
program's own; they mean something in this space alone, so a forged one can reach nobody else's. What a command does is
the engine's matter (`weft.core.wire`, `weft.sched.spaces`). Used from one event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.abi.errors import UnknownHandle, WeftError
from weft.core.sampling import SamplingParams
from weft.core.wire import (
    AllocEmbeds,
    AllocPages,
    CloseQueue,
    CloseSpace,
    CopyTokens,
    EmbedText,
    ExportPages,
    Forward,
    ForwardSample,
    FreeEmbeds,
    FreePages,
    ImportPages,
    MaskPage,
    NextDist,
    OpenQueue,
    OpenSpace,
    QueueCommand,
    ReleaseExport,
    SetQueuePriority,
    Sync,
    Usage,
)
from weft.programs.operations import Operation, Report
from weft.programs.types import Caller

if TYPE_CHECKING:
    from weft.programs.runtime import Runtime

MAX_SILENT = 512
"""Commands without an answer before one is asked for, so that what is remembered of them stays bounded."""

OnFailure = Callable[[int, WeftError], None]
"""(call, error): a command without an answer has failed. `call` is the caller's own number of it."""


class _Silent(Operation):
    """A command that reports nothing unless it fails."""

    __slots__ = ("_call", "_on_failure")

    def __init__(self, op: int, space_id: int, call: int, on_failure: OnFailure):
        super().__init__(op, space_id)
        self._call = call
        self._on_failure = on_failure

    def fail(self, error: WeftError, usage: Usage | None = None) -> None:
        """Tell the program."""
        super().fail(error, usage)
        self._on_failure(self._call, error)


class Space:
    """See the module's docstring. Every method returns at once; a `Report` may be awaited.

    Lists of pages and embeddings are packed uint32, tokens and positions packed int32.
    """

    def __init__(self, runtime: Runtime, space: int, caller: Caller, reserve_pages: int):
        self.id = space
        self.on_failure: OnFailure = lambda call, error: None
        self._runtime = runtime
        self._open = True
        self._error: WeftError | None = None
        self._died_with_engine = False
        self._answered: dict[int, QueueReport] = {}
        self._silent: dict[int, deque[_Silent]] = {}
        """By queue."""
        self._opening = op = self._number()
        runtime.add_operation(_Silent(op, space, 0, lambda call, error: self.lose(error)))
        runtime.post(
            OpenSpace(
                space=space,
                op=op,
                tenant=caller.tenant,
                namespace=caller.namespace,
                priority=caller.priority,
                request_id=caller.request_id,
                reserve_pages=reserve_pages,
            )
        )

    # ---- queues

    def open_queue(self, queue: int, priority: int = 0, *, call: int = 0) -> None:
        """Create a command queue in the space."""
        self._tell(OpenQueue(space=self.id, queue=queue, op=self._begin(queue, call), priority=priority))

    def close_queue(self, queue: int, *, call: int = 0) -> None:
        """Forget a queue, once what is on it has run."""
        self._tell(CloseQueue(space=self.id, queue=queue, op=self._begin(queue, call)))

    def set_queue_priority(self, queue: int, priority: int, *, call: int = 0) -> None:
        """Set a queue's priority; lower runs earlier."""
        self._tell(SetQueuePriority(space=self.id, queue=queue, op=self._begin(queue, call), priority=priority))

    def sync(self, queue: int) -> Report:
        """Ends when everything put on the queue before is done."""
        return self._ask(Sync(space=self.id, queue=queue, op=self._number()))

    # ---- pages

    def alloc_pages(self, queue: int, first: int, count: int) -> Report:
        """Pages `first` to `first + count - 1`. Fails with `OutOfPages` after a bounded wait."""
        return self._ask(AllocPages(space=self.id, queue=queue, op=self._number(), first=first, count=count))

    def free_pages(self, queue: int, pages: bytes, *, call: int = 0) -> None:
        """Free pages of the space."""
        self._tell(FreePages(space=self.id, queue=queue, op=self._begin(queue, call), pages=pages))

    def copy_tokens(
        self, queue: int, source: tuple[int, int], target: tuple[int, int], count: int, *, call: int = 0
    ) -> None:
        """Copy the KV of `count` tokens from a (page, place) to free places from another on."""
        self._tell(
            CopyTokens(
                space=self.id,
                queue=queue,
                op=self._begin(queue, call),
                source=source[0],
                source_offset=source[1],
                target=target[0],
                target_offset=target[1],
                count=count,
            )
        )

    def mask_page(self, queue: int, page: int, hidden: int, *, call: int = 0) -> None:
        """Hide the tokens whose bits are set, show the others."""
        self._tell(MaskPage(space=self.id, queue=queue, op=self._begin(queue, call), page=page, hidden=hidden))

    def export_pages(self, queue: int, pages: bytes, name: str) -> Report:
        """Keep pages under a name."""
        return self._ask(ExportPages(space=self.id, queue=queue, op=self._number(), pages=pages, name=name))

    def import_pages(self, queue: int, first: int, name: str) -> Report:
        """Pages exported under a name, numbered `first` and on; `Finished.count` says how many."""
        return self._ask(ImportPages(space=self.id, queue=queue, op=self._number(), first=first, name=name))

    def release_export(self, queue: int, name: str) -> Report:
        """Forget what was exported under a name."""
        return self._ask(ReleaseExport(space=self.id, queue=queue, op=self._number(), name=name))

    # ---- embeddings

    def alloc_embeds(self, queue: int, first: int, count: int) -> Report:
        """Embeddings `first` to `first + count - 1`. Fails with `OutOfPages` after a bounded wait."""
        return self._ask(AllocEmbeds(space=self.id, queue=queue, op=self._number(), first=first, count=count))

    def free_embeds(self, queue: int, embeds: bytes, *, call: int = 0) -> None:
        """Free embeddings of the space."""
        self._tell(FreeEmbeds(space=self.id, queue=queue, op=self._begin(queue, call), embeds=embeds))

    def embed_text(self, queue: int, tokens: bytes, positions: bytes, embeds: bytes, *, call: int = 0) -> None:
        """Write the input embeddings of tokens."""
        op = self._begin(queue, call)
        self._tell(EmbedText(space=self.id, queue=queue, op=op, tokens=tokens, positions=positions, embeds=embeds))

    # ---- the model

    def forward(
        self,
        queue: int,
        read: bytes,
        inputs: bytes,
        write: bytes = b"",
        outputs: bytes = b"",
        mask: bytes = b"",
        *,
        call: int = 0,
    ) -> None:
        """Put embeddings through the model; see `weft.core.wire.Forward`."""
        op = self._begin(queue, call)
        self._tell(
            Forward(
                space=self.id, queue=queue, op=op, read=read, inputs=inputs, write=write, outputs=outputs, mask=mask
            )
        )

    def forward_sample(
        self,
        queue: int,
        read: bytes,
        tokens: bytes,
        positions: bytes,
        write: bytes,
        mask: bytes,
        sampling: SamplingParams,
        index: int = 0,
    ) -> Report:
        """Put tokens through the model and sample what follows: `Finished.tokens`."""
        return self._ask(
            ForwardSample(
                space=self.id,
                queue=queue,
                op=self._number(),
                read=read,
                tokens=tokens,
                positions=positions,
                write=write,
                mask=mask,
                sampling=sampling,
                index=index,
            )
        )

    def next_dist(self, queue: int, k: int, embeds: bytes, targets: bytes = b"") -> Report:
        """The `k` most probable tokens after each embedding, and the log-probabilities of given ones:
        `Finished.dists`."""
        op = self._number()
        return self._ask(NextDist(space=self.id, queue=queue, op=op, k=k, embeds=embeds, targets=targets))

    # ---- life

    def release(self) -> None:
        """Give everything up, exports excepted. Does nothing the second time."""
        if not self._open:
            return
        self._open = False
        self._forget(lambda operation: operation.cancel())
        self._runtime.remove_space(self)
        # Also where it is lost as far as is known here: an engine that lives may hold it.
        if not self._died_with_engine:
            self._runtime.post(CloseSpace(space=self.id))

    # ---- for Runtime

    def lose(self, error: WeftError, *, engine_died: bool = False) -> None:
        """Fail everything that waits here, and everything that will be asked. `engine_died`: the engine that held it is
        gone, so that there is nothing to give back."""
        self._error = self._error or error
        self._died_with_engine = self._died_with_engine or engine_died
        self._forget(lambda operation: operation.fail(error))

    def ended(self, operation: Operation) -> None:
        """Forget an operation, and the silent ones before it on its queue: commands of a queue run in order."""
        report = self._answered.pop(operation.op, None)
        silent = self._silent.get(report.queue) if report is not None else None
        while silent and silent[0].op < operation.op:
            self._runtime.remove_operation(silent.popleft().op)

    # ---- inside

    def _check(self) -> None:
        if not self._open:
            raise UnknownHandle("this space was given up; open another one")
        if self._error is not None:
            raise self._error

    def _number(self) -> int:
        self._check()
        return self._runtime.number()

    def _begin(self, queue: int, call: int) -> int:
        """The number of a command without an answer, remembered in case that it fails."""
        op = self._number()
        silent = self._silent.setdefault(queue, deque())
        operation = _Silent(op, self.id, call, self._failed)
        silent.append(operation)
        self._runtime.add_operation(operation)
        return op

    def _failed(self, call: int, error: WeftError) -> None:
        self.on_failure(call, error)

    def _tell(self, command: QueueCommand | OpenQueue) -> None:
        self._runtime.post(command)
        if len(self._silent[command.queue]) >= MAX_SILENT:
            self.sync(command.queue)

    def _ask(self, command: QueueCommand) -> Report:
        report = QueueReport(command.op, self.id, command.queue)
        self._answered[command.op] = report
        self._runtime.add_operation(report)
        self._runtime.post(command)
        return report

    def _forget(self, end: Callable[[Operation], None]) -> None:
        operations: list[Operation] = [*self._answered.values(), *(s for q in self._silent.values() for s in q)]
        self._answered.clear()
        self._silent.clear()
        self._runtime.remove_operation(self._opening)
        for operation in operations:
            self._runtime.remove_operation(operation.op)
            operation.cancelled_by_program = True
            end(operation)
            operation.wake()


class QueueReport(Report):
    """A command on a queue. Awaiting it gives its `Finished`; raises what it failed with."""

    __slots__ = ("queue",)

    def __init__(self, op: int, space_id: int, queue: int):
        super().__init__(op, space_id)
        self.queue = queue
