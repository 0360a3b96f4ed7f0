"""The guest: CPython in Wasm that takes a program's source text. Built by `weft.programs.sandbox.build_runner`.

Owns the order in which the world is put together (what is imported here is in the image; what runs later finds no
files), and one run. It does not know what operations mean (`weft.sdk` does). Runs once per instance.
"""

import array
import asyncio
import contextlib
import gc
import importlib
import json
import linecache
import pkgutil
import random
import sys
import types

# The C modules ask the system for the time; those in Python ask `time`, which is replaced below.
sys.modules["_datetime"] = sys.modules["_zoneinfo"] = None

from weft.programs.sandbox.runner.doors import ENTROPY, Output, close_doors, install_clocks
from weft.programs.sandbox.runner.link import LINK
from weft.programs.sandbox.runner.loop import HostLoop

# What a program may import must be loaded now: there are no files later.
PRELOADED = """
abc argparse array ast asyncio base64 binascii bisect calendar cmath codecs collections collections.abc colorsys
concurrent.futures configparser contextlib contextvars copy copyreg csv dataclasses datetime decimal difflib dis
email.message encodings.ascii encodings.cp1252 encodings.idna encodings.latin_1 encodings.punycode encodings.utf_16
encodings.utf_32 enum errno fnmatch fractions functools gc graphlib hashlib heapq hmac html html.entities
html.parser http inspect io itertools json keyword linecache locale logging math mimetypes numbers opcode operator
os.path pathlib pprint queue random re reprlib sched secrets shlex signal statistics string string.templatelib
stringprep struct symtable textwrap threading timeit token tokenize traceback types typing unicodedata unittest
unittest.mock urllib urllib.parse uuid warnings weakref xml.etree.ElementTree zlib zoneinfo
"""
# Made by componentize-py from runner.wit.
wit_world = importlib.import_module("wit_world")
host = LINK.host = importlib.import_module("wit_world.imports.host")

for _name in PRELOADED.split():
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
install_clocks()

import weft.sdk
from weft.sdk import main as program
from weft.sdk.channel import Channel, install
from weft.sdk.errors import InvalidRequest

for _module in pkgutil.walk_packages(weft.sdk.__path__, "weft.sdk."):
    importlib.import_module(_module.name)
close_doors()


# ---- the run

_RUNNING = (
    *(__file__, asyncio.base_events.__file__, asyncio.events.__file__, program.__file__),
    *(sys.modules[f"weft.programs.sandbox.runner.{name}"].__file__ for name in ("doors", "link", "loop", "source")),
)


def _own(error, name):
    """Cut what runs the program off both ends of a traceback; where nothing is left, there was no program yet."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename in _RUNNING:
        first = first.tb_next
    last = step = first
    while step is not None:
        if step.tb_frame.f_code.co_filename not in _RUNNING:
            last = step
        step = step.tb_next
    if last is not None:
        last.tb_next = None
    error.__traceback__ = first


def _failure(error, source, name):
    try:
        _own(error, name)
        if isinstance(error, MemoryError):
            return {"kind": "memory_bytes", "message": str(error), "traceback": program.trace(error, source, name)}
        if isinstance(error, InvalidRequest) and error.__traceback__ is None:
            return {"kind": "failed", "message": str(error), "traceback": ""}
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return {"kind": "failed", "message": text, "traceback": program.trace(error, source, name)}
    except BaseException as second:
        # The program's own classes are at work in str(error).
        return {"kind": "failed", "message": f"{type(error).__name__}, and {type(second).__name__} while it was shown"}


class WitWorld(wit_world.WitWorld):
    """The export."""

    def run(self, source: str, name: str, args: str, seed: str) -> str:
        """See runner.wit."""
        source, name = (text.encode("latin-1").decode("utf-8") for text in (source, name))
        LINK.channel = Channel(lambda: None)
        install(LINK.channel)
        ENTROPY.seed(seed.encode("latin-1"))
        random.seed(ENTROPY(32))
        sys.stdout, sys.stderr = Output(1), Output(3)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        loop = HostLoop()
        asyncio.set_event_loop(loop)
        try:
            text = args.encode("latin-1")
            LINK.channel.values["args"] = program.decode_args(text)
            answer = "R" + loop.run_until_complete(program.run(source, name, text)).decode("latin-1")
        except BaseException as error:
            failure = _failure(error, source, name)
            # MemoryError: what is left needs room.
            error.__traceback__ = None
            answer = "E" + json.dumps(failure)
        sys.stdout.flush()
        sys.stderr.flush()
        if LINK.channel._outbox:
            LINK.push()
        return answer


# ---- warm up: what the first run of a program would compute, cache and allocate is part of the image afterwards


_WARM = """
import asyncio, json
from weft.sdk.channel import current
from weft.sdk.wire import Op
class Error(Exception): pass
async def step(n):
    await asyncio.sleep(0)
    return n
async def main(args):
    print("warm")
    await asyncio.gather(*(step(n) for n in range(3)))
    current().post(Op.SEND, json.dumps(args).encode())
    if args: raise Error("warm")
    return {"a": [1, 2.5, "x"]}
"""


def _warm_up():
    LINK.host = types.SimpleNamespace(now=lambda: 1e9, exchange=lambda commands, timeout: "")
    output, errors = sys.stdout, sys.stderr
    world = WitWorld()
    for n in range(30):
        world.run(_WARM, "program.py", "[1]" if n % 3 == 2 else "null", "seed")
    linecache.cache.clear()
    sys.stdout, sys.stderr, LINK.host = output, errors, host
    asyncio.set_event_loop(None)
    LINK.channel = None
    LINK._early.clear()


def _fill_holes():
    """Take the free pieces between what was allocated so far, so that programs allocate from the end of memory: pages
    there are written to by the dozen, while each piece in between would make a page of the image the instance's own."""
    filling, highest = [], 0
    for size in (4096, 2048, 1024, 512, 256, 128, 96, 64, 48, 32, 16):
        at_the_end = 0
        while at_the_end < 100:
            piece = array.array("B", bytes(size))
            address = piece.buffer_info()[0]
            at_the_end = at_the_end + 1 if address > highest else 0
            highest = max(highest, address)
            filling.append(piece)
    return filling


_warm_up()
# The seed of str hashes and all imported objects are the same in every instance: none of them is collected.
gc.collect()
gc.freeze()
_filling = _fill_holes()
gc.freeze()
