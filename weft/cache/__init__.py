"""KV pages as numbers: who owns which, what can be found again, what may be evicted. Pure: no torch, clock or I/O."""
