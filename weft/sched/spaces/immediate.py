"""`ImmediateCommands`: the commands on handles alone, carried out without a step.

Owns what each does to its space and to the pool. `spaces.py` calls it for the first command of a queue. An error that a
command raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.abi.errors import InvalidRequest, OutOfPages
from weft.core.wire import (
    AllocEmbeds,
    AllocPages,
    ExportPages,
    FreeEmbeds,
    FreePages,
    ImportPages,
    MaskPage,
    QueueCommand,
    ReleaseExport,
)
from weft.sched.spaces.pool import SpacePool
from weft.sched.spaces.resources import EmbedHandle, PageHandle, Space, handles

MAX_NAME = 256

Count = int | None
"""`Finished.count` of a command that is done; None: it waits for room."""


class ImmediateCommands:
    """Carries out commands on the handles of spaces, whose pages and embeddings are of one pool."""

    def __init__(self, pool: SpacePool, page_size: int):
        self._pool = pool
        self._page_size = page_size

    def carry_out(self, space: Space, command: QueueCommand, now: float) -> Count:
        """Carry a command out, or nothing of it where it has to wait for room. Raises `WeftError`."""
        carry_out = _CARRIED_OUT_BY.get(type(command))
        if carry_out is None:
            raise InvalidRequest(f"a queue does not take {type(command).__name__}")
        return carry_out(self, space, command, now)

    def _alloc_pages(self, space: Space, command: AllocPages, now: float) -> Count:
        numbers = space.claim(command.first, command.count, space.pages, "page")
        if command.count > self._pool.max_pages:
            raise OutOfPages(f"{command.count} pages are more than programs may hold, {self._pool.max_pages}")
        pages = self._pool.take(space, command.count, now)
        if pages is None:
            return None
        size = self._page_size
        space.pages.update((number, PageHandle.empty(page, size)) for number, page in zip(numbers, pages, strict=True))
        return 0

    def _free_pages(self, space: Space, command: FreePages, now: float) -> Count:
        numbers = handles(command.pages, "pages")
        pages = [space.page(number).page for number in numbers]
        space.forget(numbers)
        self._pool.give_back(space, pages, now)
        return 0

    def _alloc_embeds(self, space: Space, command: AllocEmbeds, now: float) -> Count:
        numbers = space.claim(command.first, command.count, space.embeds, "embedding")
        if command.count > self._pool.num_embeds:
            raise OutOfPages(f"{command.count} embeddings are more than this engine has, {self._pool.num_embeds}")
        slots = self._pool.take_embeds(command.count)
        if slots is None:
            return None
        space.embeds.update((number, EmbedHandle(slot)) for number, slot in zip(numbers, slots, strict=True))
        return 0

    def _free_embeds(self, space: Space, command: FreeEmbeds, now: float) -> Count:
        numbers = handles(command.embeds, "embeds")
        slots = [space.embed(number).slot for number in numbers]
        for number in numbers:
            del space.embeds[number]
        self._pool.give_back_embeds(slots)
        return 0

    def _mask_page(self, space: Space, command: MaskPage, now: float) -> Count:
        space.page(command.page).hidden = command.hidden
        return 0

    def _export_pages(self, space: Space, command: ExportPages, now: float) -> Count:
        if not command.pages or not 0 < len(command.name) <= MAX_NAME:
            raise InvalidRequest(f"an export needs pages, and a name of 1 to {MAX_NAME} characters", "name")
        pages = [space.page(number) for number in handles(command.pages, "pages")]
        self._pool.export(space, command.name, pages, now)
        return 0

    def _import_pages(self, space: Space, command: ImportPages, now: float) -> Count:
        pages = self._pool.find_export(space.namespace, command.name)
        numbers = space.claim(command.first, len(pages), space.pages, "page")
        if not self._pool.share(space, [page.page for page in pages], now):
            return None
        space.pages.update(zip(numbers, pages, strict=True))
        return len(pages)

    def _release_export(self, space: Space, command: ReleaseExport, now: float) -> Count:
        self._pool.release_export(space.namespace, command.name, now)
        return 0


def makes_export(command: QueueCommand) -> bool:
    """Whether what it leaves outlives the space."""
    return isinstance(command, ExportPages)


def waits_for_export(command: QueueCommand, delayed: Iterable[QueueCommand]) -> bool:
    """Whether a command names an export that one of the `delayed` makes, which came before it."""
    return isinstance(command, ExportPages | ImportPages | ReleaseExport) and any(
        isinstance(other, ExportPages) and other.name == command.name for other in delayed
    )


_CARRIED_OUT_BY: dict[type[QueueCommand], Callable[..., Count]] = {
    AllocPages: ImmediateCommands._alloc_pages,
    FreePages: ImmediateCommands._free_pages,
    AllocEmbeds: ImmediateCommands._alloc_embeds,
    FreeEmbeds: ImmediateCommands._free_embeds,
    MaskPage: ImmediateCommands._mask_page,
    ExportPages: ImmediateCommands._export_pages,
    ImportPages: ImmediateCommands._import_pages,
    ReleaseExport: ImmediateCommands._release_export,
}
"""The commands that are carried out here."""
