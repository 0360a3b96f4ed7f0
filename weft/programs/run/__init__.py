"""The host side of one run: its context, the calls of its program, its messages, and its record."""
