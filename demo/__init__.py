"""A tour of a running server: `make demo`."""
