"""Calls on sequences that tests of sessions share."""

from tests.programs.sessions import Program
from weft.abi.operations import Op
from weft.core.ids import pack_tokens, unpack_tokens

PROMPT = pack_tokens(list(b"prompt"))


def opened(program: Program, number: int = 1, prompt: bytes = PROMPT) -> None:
    program.say(Op.SEQ_OPEN, number, 0)
    program.say(Op.SEQ_APPEND, number, prompt)


def joined(program: Program, call: int) -> tuple[list[int], str]:
    """Tokens and text of all parts."""
    parts = program.parts(call)
    tokens = [token for part in parts for token in unpack_tokens(part[0])]
    return tokens, b"".join(part[1] for part in parts).decode()
