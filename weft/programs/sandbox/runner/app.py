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
import marshal
import pkgutil
import random
import sys
import warnings

# The C modules ask the system for the time; those in Python ask `time`, which is replaced below.
sys.modules["_datetime"] = sys.modules["_zoneinfo"] = None

from weft.programs.sandbox.runner.stdlib_stubs import ENTROPY, LogOutput, install_stubs, install_clocks
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

import weft.abi
import weft.sdk
import weft.text
from weft.programs.sandbox.runner import warm
from weft.sdk import main as program
from weft.sdk.channel import Channel, install
from weft.abi.errors import InvalidRequest

for _room in (weft.abi, weft.text, weft.sdk):
    for _module in pkgutil.walk_packages(_room.__path__, f"{_room.__name__}."):
        importlib.import_module(_module.name)
install_stubs()


# ---- the run

_RUNNING = (
    *(__file__, asyncio.base_events.__file__, asyncio.events.__file__, program.__file__),
    *(
        sys.modules[f"weft.programs.sandbox.runner.{name}"].__file__
        for name in ("stdlib_stubs", "link", "loop", "source")
    ),
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


_MAX_CHARS = 16 << 10
"""Of a failure's message, and of its traceback."""


def _shortened(text):
    cut = len(text) - _MAX_CHARS
    half = _MAX_CHARS // 2
    return text if cut <= 0 else f"{text[:half]} … ({cut} characters are left out) … {text[-half:]}"


def _failure(error, source, name):
    return {key: _shortened(text) for key, text in _whole_failure(error, source, name).items()}


def _whole_failure(error, source, name):
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


_SPARE = []
_SPARE_BYTES = 256 << 10
"""Room to say what went wrong where a program has taken all other; set aside in the image."""


def _text(said):
    return said.encode("latin-1").decode("utf-8")


class WitWorld(wit_world.WitWorld):
    """The exports that runner.wit declares."""

    def compile(self, source: str, name: str) -> str:
        """Compile a source to code, as runner.wit declares."""
        try:
            with warnings.catch_warnings(record=True) as said:
                code = program.compiled(_text(source), _text(name))
        except Exception:
            return ""
        # What the compiler remarks is for each run's log.
        return "" if said else marshal.dumps(code).decode("latin-1")

    def run(self, source: str, name: str, code: str, args: str, seed: str) -> str:
        """Run a program, as runner.wit declares."""
        source, name = _text(source), _text(name)
        LINK.channel = Channel(lambda: None, LINK.push)
        install(LINK.channel)
        ENTROPY.seed(seed.encode("latin-1"))
        random.seed(ENTROPY(32))
        sys.stdout, sys.stderr = LogOutput(1), LogOutput(3)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        loop = HostLoop()
        asyncio.set_event_loop(loop)
        try:
            text = args.encode("latin-1")
            LINK.channel.values["args"] = program.decode_args(text)
            loaded = marshal.loads(code.encode("latin-1")) if code else program.compiled(source, name)
            answer = "R" + loop.run_until_complete(program.run(loaded, text)).decode("latin-1")
            # What it said last may be refused, and events may have come while it could not take them.
            if LINK.channel._outbox or LINK._early:
                LINK.channel.dispatch(LINK.exchange(0.0))
            LINK.channel.raise_failure()
        except BaseException as error:
            _SPARE.clear()
            failure = _failure(error, source, name)
            error.__traceback__ = None
            answer = "E" + json.dumps(failure)
            if failure["kind"] == "memory_bytes":
                # What could not be sent for want of memory would fail again, here with nobody to catch it.
                LINK.channel._outbox.clear()
        sys.stdout.flush()
        sys.stderr.flush()
        if LINK.channel._outbox:
            LINK.push()
        return answer


# ---- the image


def _warm_up():
    """See `warm`."""
    output, errors = sys.stdout, sys.stderr
    LINK.host = warm.Host()
    world = WitWorld()
    for n in range(30):
        code = world.compile(warm.PROGRAM, "program.py") if n % 3 == 0 else ""
        answer = world.run(warm.PROGRAM, "program.py", code, "[1]" if n % 3 == 2 else "null", "seed")
        if answer[0] != "RRE"[n % 3]:
            raise RuntimeError(f"the program that warms the image up does not work: {answer}")
    linecache.cache.clear()
    sys.stdout, sys.stderr, LINK.host = output, errors, host
    asyncio.set_event_loop(None)
    LINK.channel = None
    LINK._early.clear()
    _SPARE[:] = [bytes(_SPARE_BYTES)]


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
