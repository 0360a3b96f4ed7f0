"""The clock of the front: all its own waits use it, so that tests can replace it."""

from __future__ import annotations

import asyncio


class Timer:
    """The clock of the event loop; tests replace it."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never decreases."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Return after this number of seconds."""
        await asyncio.sleep(seconds)
