"""`StepCopies`: the page copies that the step being built must carry, and which steps still use which page.

Owns the numbers of steps. Called by `weft.cache.tiers`, and by those who copy single pages.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.cache.nodes import Tier


class Copies(NamedTuple):
    """What a step must move before its forward. Pairs of page ids, source first."""

    swap_outs: list[tuple[int, int]]
    page_copies: list[tuple[int, int]]
    swap_ins: list[tuple[int, int]]


class StepCopies:
    """The copies of one step after the other. Step ids grow by one."""

    def __init__(self) -> None:
        self.launched = 0
        """The step launched last."""
        self.completed = 0
        """The last step that is done on the device, and all before it."""
        self._copies = Copies([], [], [])
        self._filled_from: dict[int, tuple[Tier, int]] = {}
        """Device pages that the step being built fills, and from where."""
        self._busy: dict[tuple[Tier, int], int] = {}
        """Pages that a step copies from or to, not to be handed out again before it is done."""

    @property
    def building(self) -> int:
        """The id of the step being built."""
        return self.launched + 1

    def take(self) -> Copies:
        """The copies of the step being built, which is about to be launched."""
        copies, self._copies = self._copies, Copies([], [], [])
        self._filled_from.clear()
        return copies

    def completed_steps(self, step_id: int) -> None:
        """All steps up to `step_id` are done on the device."""
        self.completed = step_id
        if self._busy:
            self._busy = {key: step for key, step in self._busy.items() if step > step_id}

    def copy_page(self, source: int, destination: int) -> None:
        """Have the step being built copy a device page, as it will be when that step begins.

        All copies of a step read before any of them is visible to another, so a page that the same step fills is
        replaced by what it is filled from.
        """
        self._fill(self._filled_from.get(source, ("device", source)), destination)

    def copy_in(self, host_page: int, device_page: int) -> None:
        """Have the step being built copy a host page to the device."""
        self._fill(("host", host_page), device_page)

    def copy_out(self, device_page: int, host_page: int) -> None:
        """Have the step being built copy a device page to the host, before anything else: it may write the device page
        itself."""
        self._copies.swap_outs.append((device_page, host_page))
        self._busy["host", host_page] = self.building

    def is_filling(self, pages: list[int]) -> bool:
        """Whether the step being built copies something to one of these device pages: it cannot copy from it too."""
        return bool(self._filled_from) and any(page in self._filled_from for page in pages)

    def keep_readable(self, tier: Tier, page: int) -> None:
        """The step being built reads `page`, so the page is not handed out again before that step is done."""
        self._busy[tier, page] = self.building

    def uses(self, tier: Tier, page: int) -> bool:
        """Whether a step that is not done copies from or to the page."""
        return (tier, page) in self._busy

    def fence(self, tier: Tier, page: int, fence: int) -> int:
        """The last step that uses the page, at least `fence`."""
        return max(fence, self._busy.get((tier, page), 0))

    def _fill(self, origin: tuple[Tier, int], destination: int) -> None:
        copies = self._copies.page_copies if origin[0] == "device" else self._copies.swap_ins
        copies.append((origin[1], destination))
        self._filled_from[destination] = origin
        self.keep_readable(*origin)
        self.keep_readable("device", destination)
