"""Messages between programs of one tenant: topics, and queues of unread messages.

Owns the subscriptions. A subscriber that does not read neither grows memory nor delays a sender: a queue is bounded in
messages and bytes, and a subscription that exceeds a bound *ends with an error* instead of silently losing messages.
The module knows neither runs nor the wire; a run subscribes with a callback for new messages. Used from one event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from weft.abi.errors import InvalidRequest, Overloaded
from weft.programs.run.long_integers import MAX_DIGITS, has_long_integer

MAX_TOPIC_BYTES = 256
MAX_WAITING_BYTES = 16 << 20
"""Most bytes of unread messages of one program, over all its subscriptions and its inbox."""

MAX_LISTENERS = 4096
"""Most subscriptions of one topic: a broadcast goes to all of them at once."""
MESSAGE_COST_BYTES = 64
"""Cost of a message beside its own bytes, so that empty messages are bounded too."""
_one_value = msgspec.json.Decoder(msgspec.Raw)
_TRUNCATED = "Input data was truncated"
_LINE_ENDS = bytes.maketrans(b"\r\n", b"  ")


def one_line(json: bytes) -> bytes:
    """The same JSON without line ends, which JSON allows between its parts and which would end an event of a stream."""
    return json.translate(_LINE_ENDS) if b"\n" in json or b"\r" in json else json


def reason(error: Exception) -> str:
    """Why JSON of a program cannot be read, from the error of `msgspec`, for a message that names the JSON."""
    if isinstance(error, UnicodeDecodeError):
        return "it has text with lone surrogates"
    # The decoder expects the other half of an escaped one.
    return "it ends too early, or has lone surrogates" if str(error) == _TRUNCATED else str(error)


def check_json(data: bytes, what: str, param: str | None = None) -> None:
    """Raise `InvalidRequest` unless the bytes are one JSON value in UTF-8 without lone surrogates, which can be
    embedded in other JSON unchanged, and which Python's `json` reads."""
    try:
        _one_value.decode(data)
        data.decode("utf-8")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {reason(error)}", param) from error
    if has_long_integer(data):
        raise InvalidRequest(f"{what} has an integer of more than {MAX_DIGITS:,} digits: write it as text", param)


class UnreadBytes:
    """The count of one program's unread bytes, at most `MAX_WAITING_BYTES`."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more may wait."""
        return self.num_bytes + num_bytes <= MAX_WAITING_BYTES


class MessageQueue:
    """Messages in order, bounded in number and, together with the program's other queues, in bytes."""

    def __init__(self, most: int, waiting: UnreadBytes):
        self._most = most
        self._waiting = waiting
        self._messages: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def has_room(self, message: bytes) -> bool:
        """Whether the message can be added now."""
        return len(self._messages) < self._most and self._waiting.has_room(_cost(message))

    def put(self, message: bytes) -> bool:
        """Add a message. Returns False, without adding it, if there is no room."""
        if not self.has_room(message):
            return False
        self._messages.append(message)
        self._waiting.num_bytes += _cost(message)
        return True

    def pop(self) -> bytes:
        """Remove and return the oldest message. Raises `IndexError` if there is none."""
        message = self._messages.popleft()
        self._waiting.num_bytes -= _cost(message)
        return message

    def clear(self) -> None:
        """Drop all messages that were not read."""
        self._waiting.num_bytes -= sum(map(_cost, self._messages))
        self._messages.clear()


class TopicSubscription:
    """One subscription to one topic. `queue` holds its unread messages; `error` is set once, if it falls behind."""

    def __init__(self, hub: Hub, key: tuple[str, bytes], queue: MessageQueue, on_message: Callable[[], None]):
        self.queue = queue
        self.error: Overloaded | None = None
        self._hub, self._key, self._on_message = hub, key, on_message

    @property
    def topic(self) -> bytes:
        """The topic of its messages."""
        return self._key[1]

    def offer(self, message: bytes) -> None:
        """Queue a message, or end the subscription with an error if there is no room."""
        if not self.queue.put(message):
            self.error = Overloaded(
                f"this subscription ended: {len(self.queue)} messages wait unread; read faster, or subscribe again"
            )
            self._hub.remove(self)
        self._on_message()

    def close(self) -> None:
        """End the subscription and drop unread messages. Idempotent."""
        self._hub.remove(self)
        self.queue.clear()

    # ---- for Hub

    @property
    def key(self) -> tuple[str, bytes]:
        """The key of the topic: (tenant, topic)."""
        return self._key


class Hub:
    """The topics of all tenants. A topic exists while it has subscriptions."""

    def __init__(self) -> None:
        self._topics: dict[tuple[str, bytes], dict[TopicSubscription, None]] = {}

    def subscribe(
        self, tenant: str, topic: bytes, queue: MessageQueue, on_message: Callable[[], None]
    ) -> TopicSubscription:
        """Subscribe from now on. `on_message` is called for every message and at the end. Raises `InvalidRequest`,
        and `Overloaded` where the topic has `MAX_LISTENERS`."""
        check_topic(topic)
        subscription = TopicSubscription(self, (tenant, topic), queue, on_message)
        listeners = self._topics.setdefault(subscription.key, {})
        if len(listeners) >= MAX_LISTENERS:
            raise Overloaded(f"the topic has {MAX_LISTENERS} subscriptions, as many as one may have")
        listeners[subscription] = None
        return subscription

    def broadcast(self, tenant: str, topic: bytes, message: bytes) -> int:
        """Send a message to all present subscribers of a topic, with the sender if it is one. Returns their number.
        Never waits."""
        check_topic(topic)
        listeners = list(self._topics.get((tenant, topic), ()))
        for subscription in listeners:
            subscription.offer(message)
        return len(listeners)

    def remove(self, subscription: TopicSubscription) -> None:
        """Remove a subscription from its topic. Idempotent."""
        listeners = self._topics.get(subscription.key)
        if listeners is not None:
            listeners.pop(subscription, None)
            if not listeners:
                del self._topics[subscription.key]


def _cost(message: bytes) -> int:
    return len(message) + MESSAGE_COST_BYTES


def check_topic(topic: bytes) -> None:
    """Raise `InvalidRequest` for bytes that cannot name a topic."""
    if not 0 < len(topic) <= MAX_TOPIC_BYTES:
        raise InvalidRequest(f"a topic has 1 to {MAX_TOPIC_BYTES} bytes, got {len(topic)}", "topic")
    try:
        topic.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("a topic is UTF-8 text", "topic") from error
