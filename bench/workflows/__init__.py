"""Workflows of Helium's shapes, run by clients of a server and by Weft. See `bench.workflows.__main__`."""
