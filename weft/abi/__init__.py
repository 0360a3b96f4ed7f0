"""What both sides of a boundary must agree on: errors, operations of programs and their frames, request fields.

Standard library only, and nothing of Weft's: these modules also run inside the sandbox. Every definition here is the
only one; the SDK, the program host, the engine and the server derive theirs from it or are held to it by a test.
"""
