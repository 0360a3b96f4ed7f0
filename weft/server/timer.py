"""Time that can be waited for: the one place where the front's own waits pass, so that tests decide when they do."""

from __future__ import annotations

import asyncio


class Timer:
    """The clock of the event loop; tests replace it."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never decreases."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Return when so many seconds have passed."""
        await asyncio.sleep(seconds)
