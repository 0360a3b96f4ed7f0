"""What a hostile program tries: each ends with an error that names the cause, harms no neighbour, and leaves nothing.

All run in the sandbox, on a real engine, beside a program that writes a text, which has to be the one it always is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.examples.help import WITHIN_S, Lab
from tests.examples.help import lab as opened
from tests.programs.help import settle
from weft.programs.registry import Quota, checked_code
from weft.programs.run.runs import RunSpec
from weft.programs.types import Caller

pytestmark = pytest.mark.slow


class Attack(NamedTuple):
    """A program, what it may use, and how it ends: kind and parameter of the error, and words of its message."""

    source: str
    limits: dict[str, Any]
    kind: str
    param: str | None
    says: str


IMPORTS = """
import asyncio, json
from weft.sdk import *
from weft.sdk import http, messaging, run, store
from weft.sdk.pages import Page
"""
ATTACKS = {
    "a loop": Attack(
        "def main():\n    while True: pass", {"cpu_s": 0.3}, "limit_exceeded", "cpu_s", "computed for more than 0.3 s"
    ),
    "a loop that catches everything": Attack(
        "def main():\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
        {"cpu_s": 0.3},
        "limit_exceeded",
        "cpu_s",
        "computed for more than 0.3 s",
    ),
    "a loop of awaits": Attack(
        "async def main():\n    while True: await run.sleep(0)",
        {"host_calls": 2000},
        "limit_exceeded",
        "host_calls",
        "2000",
    ),
    "waiting for ever": Attack(
        "async def main():\n    await run.receive()",
        {"wall_s": 0.3},
        "limit_exceeded",
        "wall_s",
        "longer than its limit wall_s",
    ),
    "a memory bomb": Attack(
        "def main():\n    return len(bytearray(1 << 30))",
        {},
        "limit_exceeded",
        "memory_bytes",
        "67108864 bytes of memory",
    ),
    "a growing list": Attack(
        "def main():\n    held = []\n    while True: held.append(bytes(1 << 20))",
        {},
        "limit_exceeded",
        "memory_bytes",
        "67108864 bytes of memory",
    ),
    "recursion": Attack("def main(n=0):\n    return main(n)", {}, "program_failed", None, "RecursionError"),
    "nested data": Attack(
        "def main():\n    value = []\n    for _ in range(100_000): value = [value]\n    return value",
        {},
        "program_failed",
        None,
        "call stack exhausted",
    ),
    "pages of sequences": Attack(
        "async def main():\n    held = []\n    while True:\n"
        "        held.append(Context().fill([5] * 200))\n        await held[-1].generate(max_tokens=1)",
        {"pages": 40},
        "program_failed",
        None,
        "pages",
    ),
    "pages of its own": Attack(
        "async def main():\n    queue = Queue()\n    await queue.alloc_pages(100_000)",
        {},
        "program_failed",
        None,
        "OutOfPages",
    ),
    "pages beyond its limit": Attack(
        "async def main():\n    queue = Queue()\n    await queue.alloc_pages(41)",
        {"pages": 40},
        "program_failed",
        None,
        "pages",
    ),
    "tokens": Attack(
        "async def main():\n    while True: await Context().fill('again').generate(max_tokens=50)",
        {"tokens": 200},
        "limit_exceeded",
        "tokens",
        "200",
    ),
    "a million calls": Attack(
        "async def main():\n    for number in range(1_000_001):\n        messaging.broadcast('topic', 0)\n"
        "        if number % 500 == 0: await run.sleep(0)",
        {"host_calls": 20_000},
        "limit_exceeded",
        "host_calls",
        "20000",
    ),
    "a log without end": Attack(
        "async def main():\n    while True:\n        run.log('x' * 10_000)\n        await run.sleep(0)",
        {"log_bytes": 100_000},
        "limit_exceeded",
        "log_bytes",
        "100000",
    ),
    "calls without ever awaiting": Attack(
        "async def main():\n    while True: messaging.broadcast('topic', 0)",
        {"host_calls": 20_000},
        "limit_exceeded",
        "host_calls",
        "20000",
    ),
    "a log without ever awaiting": Attack(
        "async def main():\n    while True: run.log('x' * 10_000)",
        {"log_bytes": 100_000},
        "limit_exceeded",
        "log_bytes",
        "100000",
    ),
    "a huge message": Attack(
        "async def main():\n    run.send('x' * (2 << 20))\n    for _ in range(2): await store.get('name')",
        {},
        "program_failed",
        None,
        "2097154 bytes; the limit is 1048576",
    ),
    "a huge result": Attack(
        "def main():\n    return 'x' * ((16 << 20) + 1)",
        {"memory_bytes": 256 << 20},
        "limit_exceeded",
        "result_bytes",
        "16777216 are allowed",
    ),
    "children without end": Attack(
        "async def main():\n    source = 'from weft.sdk import run\\nasync def main(): await run.receive()'\n"
        "    children = [messaging.launch(source=source) for _ in range(10)]\n"
        "    for child in children: await child.started()",
        {"children": 3},
        "program_failed",
        None,
        "children",
    ),
    "children of children": Attack(
        "SOURCE = '''\nfrom weft.sdk import messaging\n"
        "async def main(source): return await messaging.launch(source=source, args=source).join()\n'''\n"
        "async def main(): return await messaging.launch(source=SOURCE, args=SOURCE).join()",
        {"depth": 3},
        "program_failed",
        None,
        "depth",
    ),
    "a forged sequence": Attack(
        "async def main():\n    seq = Sequence()\n    seq.number = 12345\n    await seq.next_dist(1, append=[5])",
        {},
        "program_failed",
        None,
        "UnknownHandle",
    ),
    "a forged page": Attack(
        "async def main():\n    queue = Queue()\n    forged = Page(queue.channel, 3)\n"
        "    inputs = queue.alloc_embeds(1)\n    queue.embed_text([5], [0], inputs)\n"
        "    queue.forward([forged], inputs, outputs=inputs)\n    await queue.synchronize()",
        {},
        "program_failed",
        None,
        "UnknownHandle",
    ),
    "another tenant's export": Attack(
        "async def main():\n    await Queue().import_pages('secret')", {}, "program_failed", None, "UnknownHandle"
    ),
    "another tenant's values": Attack(
        "async def main():\n    assert await store.get('secret') is None\n    await Context.open('secret')",
        {},
        "program_failed",
        None,
        "UnknownHandle",
    ),
    "a socket": Attack(
        "import socket\ndef main():\n    socket.create_connection(('127.0.0.1', 80))",
        {},
        "program_failed",
        None,
        "socket",
    ),
    "a file": Attack("def main():\n    return open('/etc/passwd').read()", {}, "program_failed", None, "Error"),
    "a process": Attack(
        "import subprocess\ndef main():\n    subprocess.run(['ls'])",
        {},
        "program_failed",
        None,
        "does not support processes",
    ),
} | {
    f"egress to {host}": Attack(
        f"async def main():\n    await http.get('http://{host}/')",
        {"network": ["*"]},
        "program_failed",
        None,
        "NetworkDenied",
    )
    for host in ("127.0.0.1", "[::1]", "localhost", "169.254.169.254", "10.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]")
}
SECRETS = """
async def main():
    await store.put("secret", b"value")
    ctx = Context().fill("A secret that is nobody else's.")
    await ctx.save("secret")
    queue = Queue()
    pages, inputs = queue.alloc_pages(1), queue.alloc_embeds(3)
    queue.embed_text([5, 6, 7], range(3), inputs)
    queue.forward(inputs=inputs, write=pages)
    await queue.export_pages(pages, "secret")
"""
NEIGHBOUR = """
async def main():
    async with Context(sampler=greedy()) as ctx:
        ctx.fill("Once upon a time there was a fox who")
        return (await ctx.generate(max_tokens=40)).text
"""


class Street(NamedTuple):
    """A lab, and what the neighbour writes when it is alone."""

    lab: Lab
    text: str


@pytest.fixture(scope="module")
def street() -> Iterator[Street]:
    with opened() as lab:
        lab.allow("*")
        text, _ = lab.source(IMPORTS + NEIGHBOUR, trusted=False)
        lab.runner.run(owner(lab))
        yield Street(lab, text)


async def owner(lab: Lab) -> None:
    """Another tenant keeps something."""
    code = checked_code((IMPORTS + SECRETS).encode(), "python", Quota(), "owner")
    run = lab.host.launch(RunSpec(code=code), Caller(tenant="other", namespace="other"))
    record = await asyncio.wait_for(run.wait(), WITHIN_S)
    assert record.error is None, record.error


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack(street: Street, name: str) -> None:
    lab, attack = street.lab, ATTACKS[name]

    async def body() -> None:
        neighbour = lab.launch(IMPORTS + NEIGHBOUR, "neighbour", trusted=False)
        run = lab.launch(IMPORTS + attack.source, "attack", trusted=False, **attack.limits)
        error = (await asyncio.wait_for(run.wait(), WITHIN_S)).error
        assert (await lab.outcome(neighbour))[0] == street.text
        assert error is not None
        assert (error.kind, error.param) == (attack.kind, attack.param)
        assert attack.says in error.message
        await settle()
        assert not lab.host._active
        assert not lab.parts.hub._topics
        assert lab.parts.accounts.num_programs == lab.parts.accounts.num_pages == 0
        assert lab.runtime.num_sequences == lab.runtime.num_operations == 0
        stats = await lab.engine.stats()
        assert (stats.num_sequences, stats.num_spaces) == (0, 0)

    lab.runner.run(body())
