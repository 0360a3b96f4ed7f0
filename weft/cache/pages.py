"""`PagePool`: the page ids of one tier, with reference counts and fences.

Owns which page is free, fenced, or in use, and how many holders a page has. Knows nothing of tokens, of sequences or of
the prefix index (a page that the index keeps has the pool's mark `indexed`). Called by `weft.cache.manager`.

    free ──allocate──▶ in use (refs ≥ 1) ──drop──▶ free, or fenced until the last step that names the page is done
                          │        ▲
                        index    acquire
                          ▼        │
                       indexed (refs ≥ 0, the prefix index owns it) ──unindex──▶ free or fenced
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Page ids 0 to `num_pages - 1` of one tier."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.indexed = bytearray(num_pages)
        self._free = list(range(num_pages - 1, -1, -1))
        self._fenced: dict[int, list[int]] = {}
        self._completed = 0

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Pages without holders that a step in flight may still read or write."""
        return sum(len(pages) for pages in self._fenced.values())

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference. The caller has checked `num_free`."""
        if count > len(self._free):
            raise IndexError(f"{count} pages asked for, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`."""
        for page in pages:
            self.refs[page] += 1

    def drop(self, page: int, fence: int) -> None:
        """Take a reference away. The last holder of a page that is not indexed gives it back, usable once step `fence`
        is complete."""
        refs = self.refs[page] - 1
        if refs < 0:
            raise ValueError(f"page {page} dropped more often than it was taken")
        self.refs[page] = refs
        if refs == 0 and not self.indexed[page]:
            self._give_back(page, fence)

    def index(self, page: int) -> None:
        """The prefix index takes the page over, together with the caller's reference."""
        self.indexed[page] = 1
        self.refs[page] -= 1

    def unindex_held(self, page: int) -> None:
        """Undo `index`: the caller has its reference again, and nothing else does."""
        self.indexed[page] = 0
        self.refs[page] += 1

    def unindex(self, page: int, fence: int) -> None:
        """The prefix index lets go of a page without holders."""
        if self.refs[page]:
            raise ValueError(f"page {page} evicted while {self.refs[page]} hold it")
        self.indexed[page] = 0
        self._give_back(page, fence)

    def complete(self, step_id: int) -> None:
        """Steps up to `step_id` are done: their fences fall."""
        self._completed = max(self._completed, step_id)
        if self._fenced:
            for fence in [f for f in self._fenced if f <= step_id]:
                self._free.extend(self._fenced.pop(fence))

    def free_pages(self) -> list[int]:
        """All free pages, for integrity checks."""
        return list(self._free)

    def fenced_pages(self) -> list[int]:
        """All fenced pages, for integrity checks."""
        return [page for pages in self._fenced.values() for page in pages]

    def _give_back(self, page: int, fence: int) -> None:
        if fence <= self._completed:
            self._free.append(page)
        else:
            self._fenced.setdefault(fence, []).append(page)
