"""Parsers of generated text: tool calls, reasoning, and grammar notations.

Standard library and `weft.abi` only: the server uses them on streams, programs use them through `weft.sdk`, also inside
the sandbox.
"""
