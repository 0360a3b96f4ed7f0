"""Spaces: KV pages and embeddings that clients name and fill themselves, by commands on queues (Pie, sections 4, 5)."""
