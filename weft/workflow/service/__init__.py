"""Workflows of a server: graphs that clients gave it, and their runs. It does not know HTTP."""
