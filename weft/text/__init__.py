"""Readers of what models write: calls of tools, reasoning, and the notations of grammars.

Standard library and `weft.abi` only: the server uses them on streams, programs use them through `weft.sdk`, also inside
the sandbox.
"""
