"""KV pages that the tokens of a sequence fill, counted against the budget of its run.

Owns the arithmetic of sharing: pages up to a fork are counted once, for as long as one of the two is there. It is an
upper bound kept without asking the engine: pages shared with other programs, evicted, or not yet computed count too.
Called by the Sequence trait.
"""

from __future__ import annotations

from weft.programs.quota.budget import RunBudget


class _Shared:
    """Pages that several sequences have in common."""

    __slots__ = ("num_holders", "num_pages")

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.num_holders = 1


class PageQuota:
    """Of one sequence. `num_tokens` are those it is known to have: appended, and generated as they arrive."""

    __slots__ = ("_budget", "_own", "_page_size", "_shared", "_shared_pages", "num_tokens")

    def __init__(self, budget: RunBudget, page_size: int):
        self._budget = budget
        self._page_size = page_size
        self._own = 0
        self._shared: list[_Shared] = []
        self._shared_pages = 0
        self.num_tokens = 0

    def grow(self, count: int) -> None:
        """Tokens are added. Raises `LimitExceeded` or `OutOfPages`, having changed nothing."""
        num_tokens = self.num_tokens + count
        missing = -(-num_tokens // self._page_size) - self._own - self._shared_pages
        if missing > 0:
            self._budget.take_pages(missing)
            self._own += missing
        self.num_tokens = num_tokens

    def truncate(self, num_tokens: int) -> None:
        """Tokens past the first so many are gone."""
        if num_tokens >= self.num_tokens:
            return
        self.num_tokens = num_tokens
        surplus = self._own + self._shared_pages - -(-num_tokens // self._page_size)
        given = min(surplus, self._own)
        self._own -= given
        self._budget.give_pages(given)
        surplus -= given
        # A shared run of pages is left as a whole or kept as a whole.
        while self._shared and self._shared[-1].num_pages <= surplus:
            surplus -= self._shared[-1].num_pages
            self._leave(self._shared.pop())

    def fork(self) -> PageQuota:
        """That of a copy. Tokens being generated while it forks are counted in the parent alone."""
        if self._own:
            self._shared.append(_Shared(self._own))
            self._shared_pages += self._own
            self._own = 0
        child = PageQuota(self._budget, self._page_size)
        child.num_tokens = self.num_tokens
        child._shared = list(self._shared)
        child._shared_pages = self._shared_pages
        for shared in child._shared:
            shared.num_holders += 1
        return child

    def release(self) -> None:
        """Give all pages back: the sequence was released."""
        self._budget.give_pages(self._own)
        self._own = 0
        while self._shared:
            self._leave(self._shared.pop())
        self.num_tokens = 0

    def _leave(self, shared: _Shared) -> None:
        shared.num_holders -= 1
        self._shared_pages -= shared.num_pages
        if not shared.num_holders:
            self._budget.give_pages(shared.num_pages)
