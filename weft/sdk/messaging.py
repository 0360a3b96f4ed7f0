"""The Messaging trait: topics between programs of one tenant, and programs that a program launches.

inbox = messaging.subscribe("news")
messaging.broadcast("news", {"headline": "..."})
await inbox.get()

child = messaging.launch(program="summarise", args={"text": text})
await child.join()
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from weft.abi.errors import InvalidRequest
from weft.abi.operations import Op
from weft.sdk.answers import Answer, json_of
from weft.sdk.calls import Blobs
from weft.sdk.channel import Channel, Resource, Scoped, current
from weft.sdk.main import encode


class Message(NamedTuple):
    """A message of a subscription."""

    topic: str
    value: Any


def broadcast(topic: str, message: object) -> None:
    """Send a JSON value to all programs of this tenant that are subscribed to the topic. Returns at once."""
    current().post(Op.BROADCAST, _topic(topic), encode(message, "the message"))


def subscribe(topic: str) -> Subscription:
    """Subscribe to a topic: get all messages broadcast from now on, with those of this program."""
    return Subscription(topic)


class Subscription(Scoped):
    """The messages of one topic, in order: iterate over it, or `get` one message. End it with `close` or
    `async with`."""

    def __init__(self, topic: str):
        self.topic = topic
        self._stream = current().stream(Op.SUBSCRIBE, _topic(topic))
        # A `get` that is cancelled by a timeout must not end the subscription.
        self._stream.keep = True

    async def get(self) -> Message:
        """Wait for the next message and return it. Raises `Cancelled` after `close`."""
        topic, value = await anext(self._stream)
        return Message(topic.decode(), json.loads(value))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        return await self.get()

    def close(self) -> None:
        """End the subscription; later messages are dropped."""
        self._stream.cancel()

    def _give_up(self) -> None:
        self.close()


def launch(
    program: str | None = None,
    *,
    source: str | None = None,
    args: object = None,
    limits: Mapping[str, Any] | None = None,
) -> Child:
    """Launch a program as a child: an uploaded program by name, or a program from its source.

    The child spends what remains of this program's limits, or less where `limits` says so, and is cancelled when this
    program ends.
    """
    if (program is None) == (source is None):
        raise InvalidRequest("launch takes the name of a program or a source, one of the two", "program")
    about = {"program": program, "source": source, "args": args, "limits": dict(limits or {})}
    return Child(current(), encode(about, "the arguments"))


class Child(Resource):
    """A program that this one launched."""

    noun = "child"

    def __init__(self, channel: Channel, about: bytes):
        super().__init__(channel)
        self._started = channel.ask(Op.LAUNCH, self.number, about, owner=self)
        self._started.spill = True

    def started(self) -> Answer[str]:
        """The id of the child's run, once it has started. Raises the error that prevented the start."""
        return Answer(self._started, _run)

    def join(self) -> Answer[Any]:
        """The value that the child's `main` returned. Raises `ProgramFailed` if the child ended with an error."""
        self.check()
        return Answer(self.channel.ask(Op.JOIN, self.number, owner=self), json_of)

    def cancel(self) -> None:
        """Cancel the child. A `join` then raises `RunCancelled`."""
        self.check()
        self.channel.post(Op.KILL, self.number, owner=self)


def _run(blobs: Blobs) -> str:
    return str(json.loads(blobs[0])["run"])


def _topic(topic: str) -> bytes:
    if not topic:
        raise InvalidRequest("a topic needs a name", "topic")
    return topic.encode()
