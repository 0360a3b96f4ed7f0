"""`SpacePool`: the device pages and embedding slots that spaces hold, reserve or have exported.

Owns their number, the bound on it, and exports by name. Does not know handles or commands; `spaces.py` calls it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from weft.abi.errors import OutOfPages, UnknownHandle
from weft.cache.manager import KVCache
from weft.sched.spaces.resources import PageHandle, Space

MakeRoom = Callable[[int, float], bool]
"""(pages, now): have sequences without a slot give pages up until so many are available. Whether they are."""


class Export(NamedTuple):
    """Pages under a name, as they were when they were exported. They are the tenant's until the name is released."""

    tenant: str
    pages: list[PageHandle]


class SpacePool:
    """Pages and embedding slots of spaces: at most `max_pages` device pages and `num_embeds` slots."""

    def __init__(self, cache: KVCache, max_pages: int, num_embeds: int, make_room: MakeRoom):
        self._cache = cache
        self.max_pages = max_pages
        self.num_embeds = num_embeds
        self._make_room = make_room
        self._free_embeds = list(range(num_embeds - 1, -1, -1))
        self._exports: OrderedDict[tuple[str, str], Export] = OrderedDict()
        self._is_named = False
        """The step being built names pages, so a page that is given up now may be named by it."""
        self._returning: list[tuple[Space, int]] = []
        """Pages of reservations that the step being built may name: theirs again when it is."""
        self.num_pages = 0
        """References on pages that are held here; what spaces have lent counts, so that it can always come back."""
        self.held: Counter[str] = Counter()
        """Of them, those of each tenant: of its spaces, their reservations, and its exports."""

    # Steps

    def named(self) -> None:
        """The step being built names pages: a page that is given up from now on is not handed out again in this step.
        Before this call, pages are free at once: a step that stays empty is never launched, so no fence would fall."""
        self._is_named = True

    def end_step(self) -> None:
        """It is built. Later steps write after it has read."""
        self._is_named = False
        for space, page in self._returning:
            space.reserved.append(page)
        self._returning.clear()

    # Pages

    def reserve(self, space: Space, count: int, now: float) -> None:
        """Take a space's reservation. Raises `OutOfPages` when there is no room for it now."""
        self._fit_share(space, count, now)
        pages = self._take(space, count, now)
        if pages is None:
            raise OutOfPages(
                f"{count} pages cannot be reserved: programs hold {self.num_pages} of at most {self.max_pages}, or "
                "requests are using the rest; ask for less, or try again later"
            )
        space.reserved, space.reservation = pages, count

    def take(self, space: Space, count: int, now: float) -> list[int] | None:
        """Device pages for a space: from its reservation, then from what is left. None: not now. Raises `OutOfPages`
        beyond the tenant's share."""
        self._fit_share(space, max(0, count - len(space.reserved)), now)
        return self._take_reserved_first(space, count, now)

    def take_scratch(self, space: Space, count: int, now: float) -> list[int] | None:
        """Pages that only the step being built uses: `drop` them in it. None: not now."""
        return self._take(space, count, now)

    def reserved(self, space: Space) -> list[int]:
        """The idle pages of a space's reservation, which it loses now."""
        pages = space.reserved + [page for owner, page in self._returning if owner is space]
        self._returning = [item for item in self._returning if item[0] is not space]
        return pages

    def give_back(self, space: Space, pages: list[int], now: float) -> None:
        """A space no longer uses these; its reservation keeps what it lacks, unless they are shared."""
        num_idle = len(space.reserved) + sum(owner is space for owner, _ in self._returning)
        num_lacking = self._unused_reservation(space) - num_idle
        for page in pages:
            if num_lacking > 0 and not self.is_shared(page):
                num_lacking -= 1
                if self._is_named:
                    self._returning.append((space, page))
                else:
                    space.reserved.append(page)
            else:
                self.drop(space.tenant, [page], now)

    def drop(self, tenant: str, pages: list[int], now: float) -> None:
        """Give up one reference of a tenant on each page; a page without references is free."""
        if self._is_named:
            # The step being built may name them already.
            for page in pages:
                self._cache.tiers.copies.keep_readable("device", page)
        for page in pages:
            self._cache.tiers.drop_ref(page, now)
        self._count(tenant, -len(pages))

    def forget(self, tenant: str, count: int) -> None:
        """Pages of a tenant that were lent are gone."""
        self._count(tenant, -count)

    @property
    def last_step(self) -> int:
        """The last step that may name pages of spaces."""
        copies = self._cache.tiers.copies
        return copies.building if self._is_named else copies.launched

    def share(self, space: Space, pages: list[int], now: float) -> bool:
        """One more reference on each, which counts like a page. False: not now. Raises `OutOfPages` beyond the
        tenant's share."""
        self._refer(space.tenant, pages)
        return self._keep(space, pages, now)

    def is_shared(self, page: int) -> bool:
        """Whether the device page has other references."""
        return self._cache.tiers.device.refs[page] > 1

    def own_copy(self, space: Space, page: PageHandle, now: float) -> bool:
        """Put a copy of its own in place of a shared page, made by the step being built. False: no room now."""
        pages = self._take_reserved_first(space, 1, now)
        if pages is None:
            return False
        self._cache.tiers.copies.copy_page(page.page, pages[0])
        self.drop(space.tenant, [page.page], now)
        page.page = pages[0]
        self.named()  # by the copy, also where the command that needs it fails after this
        return True

    # Embeddings

    def take_embeds(self, count: int) -> list[int] | None:
        """Embedding slots; None: not now."""
        if count > len(self._free_embeds):
            return None
        return [self._free_embeds.pop() for _ in range(count)]

    def give_back_embeds(self, slots: list[int]) -> None:
        """Embedding slots are free at once, without a fence: steps run in order, so the next owner writes a slot after
        its last reader."""
        self._free_embeds.extend(slots)

    # Exports

    def export(self, space: Space, name: str, pages: list[PageHandle], now: float) -> None:
        """Keep pages under a name, in place of what was there. Raises `OutOfPages`."""
        # References first: the pages of what is replaced may be among the new ones.
        numbers = [page.page for page in pages]
        self._refer(space.tenant, numbers)
        self.release_export(space.namespace, name, now)
        if not self._keep(space, numbers, now):
            raise OutOfPages(
                f"{len(pages)} pages cannot be exported: programs hold {self.num_pages} of at most {self.max_pages}"
            )
        copies = [page.copy() for page in pages]
        for copy in copies:
            copy.hidden = 0  # a mask belongs to a handle
        self._exports[space.namespace, name] = Export(space.tenant, copies)

    def find_export(self, namespace: str, name: str) -> list[PageHandle]:
        """New handles on exported pages. Raises `UnknownHandle`."""
        export = self._exports.get((namespace, name))
        if export is None:
            raise UnknownHandle(f"nothing is exported under {name!r}: never, or it had to make room")
        self._exports.move_to_end((namespace, name))
        return [page.copy() for page in export.pages]

    def release_export(self, namespace: str, name: str, now: float) -> None:
        """Forget a name. Does nothing for one that is not there."""
        export = self._exports.pop((namespace, name), None)
        if export is not None:
            self.drop(export.tenant, [page.page for page in export.pages], now)

    def drop_exports(self, now: float) -> bool:
        """Forget all names. Whether there were any."""
        names = list(self._exports)
        for namespace, name in names:
            self.release_export(namespace, name, now)
        return bool(names)

    def exported_pages(self) -> Iterator[int]:
        """Device pages of all exports, for integrity checks."""
        for export in self._exports.values():
            yield from (page.page for page in export.pages)

    # Inside

    def _take_reserved_first(self, space: Space, count: int, now: float) -> list[int] | None:
        own = min(count, len(space.reserved))
        more = self._take(space, count - own, now)
        if more is None:
            return None
        pages = [space.reserved.pop() for _ in range(own)]
        return pages + more

    def _take(self, space: Space, count: int, now: float) -> list[int] | None:
        if count == 0:
            return []
        if not self._make_countable(space.namespace, count, now) or not self._make_room(count, now):
            return None
        pages = self._cache.allocate(count, now)
        if pages is not None:
            self._count(space.tenant, count)
        return pages

    def _refer(self, tenant: str, pages: list[int]) -> None:
        for page in pages:
            self._cache.tiers.share_ref(page)
        self._count(tenant, len(pages))

    def _keep(self, space: Space, pages: list[int], now: float) -> bool:
        """Make room for references that were just made, or give them up. The exports that have to go may be of these
        very pages."""
        kept = False
        try:
            self._fit_share(space, 0, now)
            kept = self._make_countable(space.namespace, 0, now)
        finally:
            if not kept:
                self.drop(space.tenant, pages, now)
        return kept

    def _count(self, tenant: str, count: int) -> None:
        self.num_pages += count
        self.held[tenant] += count
        if not self.held[tenant]:
            del self.held[tenant]

    def _fit_share(self, space: Space, count: int, now: float) -> None:
        """Have a tenant hold no more than its share with `count` pages more: its own exports go first. Raises
        `OutOfPages`."""
        most = space.tenant_pages
        while most is not None and self.held[space.tenant] + count > most:
            own = next((key for key, export in self._exports.items() if export.tenant == space.tenant), None)
            if own is None:
                raise OutOfPages(
                    f"programs of this tenant hold {self.held[space.tenant]} explicit KV pages, and with {count} more "
                    f"they would exceed its share of {most} (programs.tenant_pages_fraction); free pages, or try again "
                    "later"
                )
            self.release_export(*own, now)

    def _make_countable(self, namespace: str, count: int, now: float) -> bool:
        """Have no more than `max_pages` with `count` more. Exports go first, those of the same namespace before others,
        so that one tenant's do not push out another's."""
        while self.num_pages + count > self.max_pages and self._exports:
            own = (key for key in self._exports if key[0] == namespace)
            self.release_export(*next(own, next(iter(self._exports))), now)
        return self.num_pages + count <= self.max_pages

    def _unused_reservation(self, space: Space) -> int:
        """How many idle pages its reservation entitles it to."""
        if not space.reservation:
            return 0
        return max(0, space.reservation - len({page.page for page in space.pages.values()}))
