"""The host side of one run: its context, the calls of its program, its messages, and what is told of it."""
