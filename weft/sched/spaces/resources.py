"""What a space holds: pages, embeddings and queues, by the numbers that its client gave them.

Owns the meaning of a handle, and what is known on the host of its contents: which places of a page are filled, with
tokens of which positions, and which of them the holder has hidden. Knows no steps and no pool.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest, UnknownHandle, WeftError
from weft.cache.explicit import ExplicitRun
from weft.cache.nodes import Wait
from weft.core.wire import QueueCommand

MAX_HANDLE = 2**32
MAX_LISTED = 1 << 17
"""Numbers that one command lists."""


LENT = -1
"""The device page of a handle while its space has lent it."""


@dataclass(slots=True, eq=False)
class PageHandle:
    """A handle on a device page."""

    page: int
    """`LENT` while the program waits and others may use the memory (`weft.sched.spaces.waits`)."""
    filled: int = 0
    """Bit s: place s holds a token, or will when the steps launched so far are done."""
    hidden: int = 0
    """Bit s: reads through this handle do not see place s."""
    positions: list[int] = field(default_factory=list)
    """[page size] of the tokens; -1 where there is none."""
    last_position: int = -1
    """The largest of them."""

    @classmethod
    def empty(cls, page: int, page_size: int) -> PageHandle:
        """A handle on a device page none of whose places is written."""
        return cls(page, positions=[-1] * page_size)

    def copy(self) -> PageHandle:
        """Another handle on the same page."""
        return PageHandle(self.page, self.filled, self.hidden, list(self.positions), self.last_position)

    def fill(self, offset: int, position: int) -> None:
        """Note a token at a place."""
        self.filled |= 1 << offset
        self.positions[offset] = position
        self.last_position = max(self.last_position, position)

    def empty_again(self, offset: int) -> None:
        """Undo `fill`, but for `last_position`."""
        self.filled &= ~(1 << offset)
        self.positions[offset] = -1


@dataclass(slots=True, eq=False)
class EmbedHandle:
    """A handle on an embedding slot."""

    slot: int
    position: int = -1
    """Of the token that the vector stands for; -1: nothing was written yet."""
    failure: WeftError | None = None
    """Why what was to write it last did not."""

    @property
    def key(self) -> int:
        """The name under which conflicts between commands are found; differs from that of every page."""
        return -1 - self.slot


@dataclass(slots=True, eq=False)
class PendingCommand:
    """A command that has not run yet."""

    command: QueueCommand
    arrival_s: float
    num_bytes: int = 0
    """Of its lists and masks."""
    blocked_since_s: float | None = None
    """When it first found no room for pages or embeddings."""
    done: int = 0
    """Inputs of a forward that have gone into steps already."""
    written: dict[PageHandle, int] = field(default_factory=dict)
    """Where their KV went: places as bits, by page."""


@dataclass(slots=True, eq=False)
class SpaceQueue:
    """Commands that run in order."""

    number: int
    priority: int
    commands: deque[PendingCommand] = field(default_factory=deque)
    last_step: int = 0
    """The last step, launched or being built, that carries one of its commands."""
    is_blocked: bool = False
    """Its first command waits for room and found none when it was last tried."""
    closing: bool = False


class Lent(NamedTuple):
    """Pages of a space whose program waits."""

    run: ExplicitRun
    pages: list[PageHandle]
    """In the order of the run."""


@dataclass(slots=True, eq=False)
class Space:
    """The pages, embeddings and queues of one program, by the numbers it gave them."""

    client: int
    number: int
    tenant: str
    namespace: str
    priority: int
    request_id: str
    arrival_s: float
    tenant_pages: int | None = None
    """As in `OpenSpace`."""
    pages: dict[int, PageHandle] = field(default_factory=dict)
    embeds: dict[int, EmbedHandle] = field(default_factory=dict)
    queues: dict[int, SpaceQueue] = field(default_factory=dict)
    reserved: list[int] = field(default_factory=list)
    """Device pages of the reservation that are not in use."""
    reservation: int = 0
    num_pending: int = 0
    """Commands on its queues that have not run yet."""
    pending_bytes: int = 0
    """Their lists and masks."""
    wait: Wait | None = None
    """What its program waits for, until the next command."""
    lent: Lent | None = None
    """Commands wait until these pages are back."""
    is_ending: bool = False
    """It was closed, and is gone once its pages are back and exported."""
    failure: WeftError | None = None
    """Why it was taken away."""
    _listed: tuple[bytes, list[PageHandle]] = (b"", [])
    """The pages listed last: a program lists the same ones from token to token."""

    @property
    def has_device_pages(self) -> bool:
        """Whether there are any that it has not lent."""
        return bool(self.reserved) or any(page.page != LENT for page in self.pages.values())

    def queue(self, number: int) -> SpaceQueue:
        """The queue of a number. Raises `UnknownHandle`."""
        queue = self.queues.get(number)
        if queue is None or queue.closing:
            raise UnknownHandle(f"there is no queue {number}: it was never opened, or was closed", "queue")
        return queue

    def page(self, number: int) -> PageHandle:
        """The page of a number. Raises `UnknownHandle`."""
        page = self.pages.get(number)
        if page is None:
            raise UnknownHandle(f"there is no page {number}: it was never allocated, or was freed")
        return page

    def listed(self, packed: bytes, what: str) -> list[PageHandle]:
        """Pages by packed numbers, all different. Raises `UnknownHandle` and `InvalidRequest`. The list is shared."""
        if packed != self._listed[0]:
            self._listed = packed, [self.page(number) for number in handles(packed, what)]
        return self._listed[1]

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove handles on pages from the space; their device pages are the caller's."""
        for number in numbers:
            del self.pages[number]
        self._listed = b"", []

    def embed(self, number: int) -> EmbedHandle:
        """The embedding of a number. Raises `UnknownHandle`."""
        embed = self.embeds.get(number)
        if embed is None:
            raise UnknownHandle(f"there is no embedding {number}: it was never allocated, or was freed")
        return embed

    def written_embed(self, number: int) -> EmbedHandle:
        """An embedding that holds something. Raises `UnknownHandle`, `InvalidRequest`, or what its writer failed
        with."""
        embed = self.embed(number)
        if embed.failure is not None:
            raise embed.failure
        if embed.position < 0:
            raise InvalidRequest(f"embedding {number} is read before anything was written to it")
        return embed

    def claim(self, first: int, count: int, taken: Collection[int], what: str) -> range:
        """New numbers. Raises `InvalidRequest` for numbers in use."""
        if count < 1 or first + count > MAX_HANDLE:
            raise InvalidRequest(f"{count} {what} from number {first} on cannot be allocated", "count")
        numbers = range(first, first + count)
        fewer, others = (numbers, taken) if count < len(taken) else (taken, numbers)
        used = next((number for number in fewer if number in others), None)
        if used is not None:
            raise InvalidRequest(f"{what} {used} is in use: numbers may be used once", "first")
        return numbers


def handles(packed: bytes, what: str) -> tuple[int, ...]:
    """Packed uint32 -> numbers, all different. Raises `InvalidRequest`."""
    numbers = _unpacked(packed, "I", what)
    if len(numbers) > 1 and len(set(numbers)) != len(numbers):
        raise InvalidRequest(f"{what} are listed twice", what)
    return numbers


@functools.cache
def lists_of(command: type[QueueCommand]) -> tuple[str, ...]:
    """The fields that are lists and masks."""
    return tuple(field.name for field in msgspec.structs.fields(command) if field.type is bytes)


def known_handles(packed: bytes) -> tuple[int, ...]:
    """What of packed uint32 can be read as numbers."""
    return struct.unpack(f"<{len(packed) // 4}I", packed[: len(packed) // 4 * 4])


def int32s(packed: bytes, what: str) -> tuple[int, ...]:
    """Packed int32 -> numbers. Raises `InvalidRequest`."""
    return _unpacked(packed, "i", what)


def _unpacked(packed: bytes, code: str, what: str) -> tuple[int, ...]:
    if not packed:
        return ()
    if len(packed) > 4 * MAX_LISTED:
        raise InvalidRequest(f"{len(packed) // 4} {what} are listed; one command lists at most {MAX_LISTED}", what)
    if len(packed) % 4:
        raise InvalidRequest(f"{len(packed)} bytes are not a whole number of 32-bit {what}", what)
    return struct.unpack(f"<{len(packed) // 4}{code}", packed)
