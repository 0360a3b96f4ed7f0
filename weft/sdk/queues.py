"""Command queues: commands of one queue run in order, commands of different queues concurrently.

async with Queue() as queue:
    pages = queue.alloc_pages(2)
    ...
    await queue.synchronize()
"""

from __future__ import annotations

from weft.abi.operations import Op
from weft.sdk.answers import Answer, nothing
from weft.sdk.channel import Channel, current
from weft.sdk.forward import ForwardQueue


class Queue(ForwardQueue):
    """A command queue of the program; its commands are those of `PageQueue` and `ForwardQueue`. Pages and embeddings
    stay when it is released.

    The error of a command is raised once, by the next use of the queue or by one of its answers.
    """

    noun = "queue"
    release_op = Op.QUEUE_CLOSE

    def __init__(self, priority: int = 0, *, channel: Channel | None = None):
        super().__init__(channel or current())
        self.channel.post(Op.QUEUE_OPEN, self.number, priority, owner=self)

    def set_priority(self, priority: int) -> None:
        """Set the priority of its commands; lower runs earlier."""
        self.check()
        self.channel.post(Op.QUEUE_PRIORITY, self.number, priority, owner=self)

    def synchronize(self) -> Answer[None]:
        """Wait until all commands put on the queue so far are done. Raises the error of a command that failed."""
        self.check()
        return Answer(self.channel.ask(Op.QUEUE_SYNC, self.number, owner=self), nothing)
