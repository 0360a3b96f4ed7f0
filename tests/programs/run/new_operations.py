"""Two operations that the product does not have, and a program that uses them: `test_new_operations` runs it.

Usage: `python -m tests.programs.run.new_operations MODULE ...`, with the modules whose additions take part. Each
addition is appended to the source of its module when that is imported; all other modules are as they are.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

TABLE = "weft.abi.operations"
METHOD = "weft.programs.run.calls.store"
COMMAND = "weft.core.wire.spaces"
ENGINE = "weft.sched.spaces.immediate"
ADDED = {
    TABLE: '''
    ECHO = 200, Trait.STORE, "echo", "Bd", 2, _ASKED
    """how often, a number; two blobs -> JSON of the numbers; the blobs that often"""
    HELD_PAGES = 201, Trait.ALLOCATE, "put", "II", 1, _ASKED, "CountPages"
    """queue, a number to add; a name -> u32 pages of the space"""
''',
    METHOD: '''
    def echo(self, call: int, times: int, number: float, first: bytes, second: bytes) -> None:
        """Answer with the numbers and the blobs."""
        self._calls.result(call, msgspec.json.encode([times, number]), first * times, second * times)
''',
    COMMAND: '''
class CountPages(AnsweredCommand, frozen=True):
    """Ends with `Finished.count`."""

    answer: ClassVar = "count"
    more: int
    name: str
''',
    ENGINE: """
from weft.core.wire.spaces import CountPages
_CARRIED_OUT_BY[CountPages] = lambda self, space, command, now: len(space.pages) + command.more
HANDLES_ONLY = frozenset(_CARRIED_OUT_BY)
""",
}


class _Appending(importlib.machinery.SourceFileLoader):
    """Loads a module from its source and an addition; neither reads nor writes bytecode files."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path) + ADDED[fullname].encode(), self.path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that have an addition."""

    def __init__(self, modules: set[str]):
        self._modules = modules

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        source = str(Path(__file__).parents[3] / (fullname.replace(".", "/") + ".py"))
        return importlib.util.spec_from_file_location(fullname, source, loader=_Appending(fullname, source))


def use() -> None:
    """Use both operations as a program does. All imports are here: the finder comes before them."""
    from tests.programs.run.test_runs_leave_nothing import on_engine
    from tests.programs.sessions import Host, Program
    from weft.abi.errors import LimitExceeded
    from weft.abi.frames import WireError, commands, pack
    from weft.abi.operations import Op, Trait
    from weft.programs.quota.limits import Limits
    from weft.programs.quota.loop_share import LoopShare
    from weft.programs.run.command_queue import CommandQueue
    from weft.sdk.answers import Answer
    from weft.sdk.channel import Channel

    echo, held = Op["ECHO"], Op["HELD_PAGES"]
    assert (echo.trait, echo.answers, held.trait, held.answers) == (Trait.STORE, True, Trait.ALLOCATE, True)

    def packing() -> None:
        packed = pack(echo, 7, 2, 0.5, b"ab", b"")
        assert list(commands(packed)) == [(echo, 7, (2, 0.5), [b"ab", b""])]
        for wrong in (packed[:-1], packed.replace(bytes([echo]), bytes([202]), 1)):
            with pytest.raises(WireError):
                list(commands(wrong))

    def connected(program: Program) -> Channel:
        """The library's end of the wire."""
        channel = Channel(lambda: None)

        async def serve() -> None:
            while True:
                program.session.commands(channel.take())
                channel.dispatch(await program.session.wait_events(None))

        server = asyncio.ensure_future(serve())
        channel.values["server"] = server
        return channel

    async def dispatch(host: Host) -> None:
        program = host.program()
        assert await program.result(echo, 2, 0.5, b"ab", b"c") == [b"[2,0.5]", b"abab", b"cc"]
        program.say(Op.QUEUE_OPEN, 1, 0)
        await program.result(Op.PAGES_ALLOC, 1, 1, 3)
        assert await program.result(held, 1, 10, b"name") == [(13).to_bytes(4, "little")]
        # The fields of a command are checked as those of any other.
        assert await program.error(held, 1, 10, b"\xff") == ("invalid_request", "name")

    async def library(host: Host) -> None:
        channel = connected(host.program())
        try:
            answer = channel.ask(echo, 1, 2.0, b"x", b"y")
            assert await Answer(answer, lambda blobs: blobs[1:]) == [b"x", b"y"]
        finally:
            channel.values["server"].cancel()

    async def limits(host: Host) -> None:
        program = host.program(Limits(host_calls=2))
        program.say(echo, 1, 0.0, b"", b"")
        program.say(echo, 1, 0.0, b"", b"")
        with pytest.raises(LimitExceeded) as raised:
            program.say(echo, 1, 0.0, b"", b"")
        assert raised.value.param == "host_calls"

    async def portions(host: Host) -> None:
        program = host.program()
        readings = itertools.count()
        share = LoopShare(pass_s=50, turn_s=50, clock=lambda: float(next(readings)))
        queue = CommandQueue(program.session, program.budget, share, tenant="t", end=program.outlet.end)
        queue.commands(b"".join(pack(echo, number, 1, 0.0, b"", b"") for number in range(500)))
        assert 0 < program.session.usage().host_calls <= 52
        while (waiting := queue.behind()) is not None:
            await waiting
        assert program.session.usage().host_calls == 500
        assert program.outlet.cpu_s > 0

    packing()
    for test in (dispatch, library, limits, portions):
        on_engine(test)


if __name__ == "__main__":
    sys.meta_path.insert(0, _Finder(set(sys.argv[1:])))
    use()
