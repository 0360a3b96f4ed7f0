"""Who runs next, with which pages: decisions as data. Pure: no torch, asyncio, sockets, clock or randomness."""
