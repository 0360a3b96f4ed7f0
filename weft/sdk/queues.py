"""Command queues: calls of one queue run in order, calls of different queues beside each other.

async with Queue() as queue:
    pages = queue.alloc_pages(2)
    ...
    await queue.synchronize()
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from weft.abi.operations import Op
from weft.sdk.answers import Answer, nothing
from weft.sdk.channel import Channel, current
from weft.sdk.forward import ForwardCalls


class Queue(ForwardCalls):
    """A queue of the program, with all that can be put on it: see `PageCalls` and `ForwardCalls`.

    What fails is raised once, by the next thing done with the queue or an answer of it.
    """

    noun = "queue"

    def __init__(self, priority: int = 0, *, channel: Channel | None = None):
        super().__init__(channel or current())
        self.channel.post(Op.QUEUE_OPEN, self.number, priority, owner=self)

    def set_priority(self, priority: int) -> None:
        """Which queue's calls come first; lower is earlier."""
        self.check()
        self.channel.post(Op.QUEUE_PRIORITY, self.number, priority, owner=self)

    def synchronize(self) -> Answer[None]:
        """Awaited: until everything put on the queue so far is done. Raises what of it failed."""
        self.check()
        return Answer(self.channel.ask(Op.QUEUE_SYNC, self.number, owner=self), nothing)

    def release(self) -> None:
        """Give the queue back; its pages and embeddings stay. Does nothing the second time."""
        if self.is_open:
            self.channel.post(Op.QUEUE_CLOSE, self.number, owner=self)
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
