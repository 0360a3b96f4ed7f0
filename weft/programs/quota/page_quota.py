"""KV pages that the tokens of a sequence fill, counted against the budget of its run.

Owns the arithmetic of sharing: a page that forks have in common is counted once, for as long as one of them uses it. A
sequence that appends to a shared page gets a copy of it. It is an upper bound kept without asking the engine: pages
shared with other programs, evicted, or not yet computed count too. Called by the Sequence trait.
"""

from __future__ import annotations

from collections import Counter

from weft.programs.quota.budget import RunBudget


class _Shared:
    """Pages in a row that several sequences have in common. Each uses the first so many of them."""

    __slots__ = ("_num_pages", "_users")

    def __init__(self, num_pages: int):
        self._num_pages = num_pages
        """Those that a sequence uses."""
        self._users = Counter({num_pages: 1})
        """Number of pages -> sequences that use so many."""

    def add_user(self, used: int) -> None:
        """One more sequence uses the first `used` pages."""
        self._users[used] += 1

    def is_only_user(self, used: int) -> bool:
        """Whether the last page of a sequence that uses the first `used` pages is used by no other."""
        return used == self._num_pages and self._users[used] == 1

    def reduce(self, used: int, kept: int) -> int:
        """A sequence uses the first `kept` pages, no longer `used`. Returns the number of pages that no sequence uses
        any more."""
        self._users[used] -= 1
        if not self._users[used]:
            del self._users[used]
        if kept:
            self._users[kept] += 1
        before, self._num_pages = self._num_pages, max(self._users, default=0)
        return before - self._num_pages


class PageQuota:
    """Of one sequence. `num_tokens` are those it is known to have: appended, and generated as they arrive."""

    __slots__ = ("_budget", "_own", "_page_size", "_shared", "_shared_pages", "num_tokens")

    def __init__(self, budget: RunBudget, page_size: int):
        self._budget = budget
        self._page_size = page_size
        self._own = 0
        self._shared: list[tuple[_Shared, int]] = []
        """With the number of pages of each that the sequence uses."""
        self._shared_pages = 0
        """Sum of those numbers."""
        self.num_tokens = 0

    def grow(self, count: int) -> None:
        """Tokens are added. Raises `LimitExceeded` or `OutOfPages`, having changed nothing."""
        num_tokens = self.num_tokens + count
        missing = -(-num_tokens // self._page_size) - self._own - self._shared_pages
        copies = bool(count and not self._own and self.num_tokens % self._page_size)
        taken = missing + (copies and not self._shared[-1][0].is_only_user(self._shared[-1][1]))
        if taken:
            self._budget.take_pages(taken)
        if copies:
            self._leave_last(1)
        self._own += missing + copies
        self.num_tokens = num_tokens

    def truncate(self, num_tokens: int) -> None:
        """Tokens past the first so many are gone."""
        if num_tokens >= self.num_tokens:
            return
        self.num_tokens = num_tokens
        surplus = self._own + self._shared_pages - -(-num_tokens // self._page_size)
        given = min(surplus, self._own)
        self._own -= given
        surplus -= given
        while surplus:
            left = min(surplus, self._shared[-1][1])
            given += self._leave_last(left)
            surplus -= left
        self._budget.give_pages(given)

    def fork(self) -> PageQuota:
        """That of a copy. Tokens being generated while it forks are counted in the parent alone."""
        if self._own:
            self._shared.append((_Shared(self._own), self._own))
            self._shared_pages += self._own
            self._own = 0
        child = PageQuota(self._budget, self._page_size)
        child.num_tokens = self.num_tokens
        child._shared = list(self._shared)
        child._shared_pages = self._shared_pages
        for shared, used in child._shared:
            shared.add_user(used)
        return child

    def release(self) -> None:
        """Give all pages back: the sequence was released."""
        self.truncate(0)

    def _leave_last(self, count: int) -> int:
        """Stop using the last `count` pages of the last shared ones. Returns the number of those that no other sequence
        uses."""
        shared, used = self._shared.pop()
        self._shared_pages -= count
        if used > count:
            self._shared.append((shared, used - count))
        return shared.reduce(used, used - count)
