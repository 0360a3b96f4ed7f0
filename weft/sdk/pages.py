"""The Allocate trait: KV pages and embeddings as explicit resources, in the program's own numbering.

    queue = Queue()
    pages = queue.alloc_pages(4)        # usable at once; `await pages` waits for the allocation
    queue.free_pages(pages)

Commands of a queue run in order, so a handle can be used before its allocation is awaited. An error is raised by the
next use of the queue. Most programs want a `Sequence` or a `Context` instead: those keep lineage, share prefixes, and
are recomputed when memory is short.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Generic, Self, TypeVar

from weft.abi.errors import InvalidRequest, LimitExceeded, UnknownHandle
from weft.abi.operations import Op
from weft.sdk.answers import Answer, nothing, pack_handles
from weft.sdk.calls import Blobs, Call
from weft.sdk.channel import Channel, OwnedResource

MAX_IMPORT_PAGES = 1 << 16
"""Handle numbers reserved for an import, whose size is unknown until the answer."""


class Handle:
    """A page or an embedding: its number, and whether it is still allocated."""

    __slots__ = ("channel", "is_open", "number")
    noun = "handle"

    def __init__(self, channel: Channel, number: int):
        self.channel = channel
        self.number = number
        self.is_open = True

    def __repr__(self) -> str:
        return f"<{self.noun} {self.number}{'' if self.is_open else ', freed'}>"


class Page(Handle):
    """A KV page: holds the KV of `Model.page_size` tokens."""

    __slots__ = ()
    noun = "page"


class Embed(Handle):
    """An embedding: one vector, the input or the output of a forward pass at one position."""

    __slots__ = ()
    noun = "embedding"


H = TypeVar("H", bound=Handle)


class Allocation(list[H], Generic[H]):
    """Handles under allocation: a list that can be used at once. Awaiting it returns the list, or raises `OutOfPages`
    if the bounded wait ended without free pages."""

    def __init__(self, handles: Iterable[H], call: Call):
        super().__init__(handles)
        self._call = call
        call.spill = True

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self._call.__await__()
        return self


class PageQueue(OwnedResource):
    """The commands of a queue that allocate, copy, mask, export and import pages."""

    noun = "queue"

    def alloc_pages(self, count: int) -> Allocation[Page]:
        """Allocate `count` empty pages, usable at once."""
        return self._alloc(Op.PAGES_ALLOC, Page, count)

    def alloc_embeds(self, count: int) -> Allocation[Embed]:
        """Allocate `count` embeddings, usable at once."""
        return self._alloc(Op.EMBEDS_ALLOC, Embed, count)

    def free_pages(self, pages: Page | Iterable[Page]) -> None:
        """Free pages. Using them afterwards raises `UnknownHandle` at once."""
        self._free(Op.PAGES_FREE, (pages,) if isinstance(pages, Page) else pages)

    def free_embeds(self, embeds: Embed | Iterable[Embed]) -> None:
        """Free embeddings. Using them afterwards raises `UnknownHandle` at once."""
        self._free(Op.EMBEDS_FREE, (embeds,) if isinstance(embeds, Embed) else embeds)

    def copy_tokens(
        self, source: Page, dest: Page, *, source_offset: int = 0, dest_offset: int = 0, count: int
    ) -> None:
        """Copy the KV of `count` tokens from an offset in one page to an offset in another."""
        self.check()
        _check(source, self.channel)
        _check(dest, self.channel)
        values = (self.number, source.number, source_offset, dest.number, dest_offset, count)
        self.channel.post(Op.TOKENS_COPY, *values, owner=self)

    def mask_page(self, page: Page, hidden: Iterable[bool]) -> None:
        """Hide tokens of a page from forward passes that read it by this handle. `hidden`: one bool per token, at most
        32."""
        self.check()
        _check(page, self.channel)
        bits = sum(1 << at for at, is_hidden in enumerate(hidden) if is_hidden)
        if bits >= 1 << 32:
            raise InvalidRequest("a page's mask has more than 32 tokens", "hidden")
        self.channel.post(Op.PAGE_MASK, self.number, page.number, bits, owner=self)

    def export_pages(self, pages: Iterable[Page], name: str) -> Answer[None]:
        """Export the pages as they are now under a name, for programs of this tenant, until the name is released."""
        call = self._ask(Op.PAGES_EXPORT, pack(pages, self.channel), name.encode())
        return Answer(call, nothing)

    def import_pages(self, name: str) -> Answer[list[Page]]:
        """Import the pages exported under a name. They are shared and copied at the first write. Raises `UnknownHandle`
        for an unknown name."""
        channel, first = self.channel, self.channel.number(MAX_IMPORT_PAGES)
        call = self._ask(Op.PAGES_IMPORT, first, name.encode())

        def decode(blobs: Blobs) -> list[Page]:
            count = int.from_bytes(blobs[0], "little")
            if count > MAX_IMPORT_PAGES:
                raise LimitExceeded(f"the export {name} has {count} pages; {MAX_IMPORT_PAGES} can be imported at once")
            return [Page(channel, first + at) for at in range(count)]

        return Answer(call, decode)

    def release_export(self, name: str) -> Answer[None]:
        """Remove an export. Pages already imported stay."""
        return Answer(self._ask(Op.PAGES_RELEASE, name.encode()), nothing)

    # Inside

    def _ask(self, op: Op, *values: float | bytes) -> Call:
        self.check()
        call = self.channel.ask(op, self.number, *values, owner=self)
        call.spill = True
        return call

    def _alloc(self, op: Op, kind: type[H], count: int) -> Allocation[H]:
        if count < 1:
            raise InvalidRequest(f"at least one {kind.noun} must be allocated, got {count}", "count")
        self.check()
        first = self.channel.number(count)
        call = self._ask(op, first, count)
        return Allocation((kind(self.channel, first + at) for at in range(count)), call)

    def _free(self, op: Op, handles: Iterable[Handle]) -> None:
        self.check()
        chosen = list(handles)
        numbers = pack(chosen, self.channel)
        if len({handle.number for handle in chosen}) != len(chosen):
            raise UnknownHandle(f"a {chosen[0].noun} is freed twice in one call")
        for handle in chosen:
            handle.is_open = False
        if chosen:
            self.channel.post(op, self.number, numbers, owner=self)


def pack(handles: Iterable[Handle], channel: Channel) -> bytes:
    """Pack the numbers of handles. Raises `UnknownHandle` for a handle that was freed or belongs to another program."""
    chosen = handles if isinstance(handles, list) else list(handles)
    for handle in chosen:
        # Inlined, because every command of a fine-grained loop runs this check.
        if not handle.is_open or handle.channel is not channel:
            _check(handle, channel)
    return pack_handles([handle.number for handle in chosen])


def _check(handle: Handle, channel: Channel) -> None:
    if not handle.is_open:
        raise UnknownHandle(f"{handle.noun} {handle.number} was freed; allocate another one")
    if handle.channel is not channel:
        raise UnknownHandle(f"{handle.noun} {handle.number} belongs to another program; export and import it")
