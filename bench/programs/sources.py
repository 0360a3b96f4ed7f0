"""The measured programs. Each takes `{"tokens": n}` and generates n tokens after a prompt of four tokens."""

from __future__ import annotations

import wasmtime

from weft.abi.frames import pack
from weft.abi.operations import Op

GENERATE = '''
"""The fused loop: the scheduler decides, one message a step brings everybody's tokens."""
from weft.sdk.sampling import Sampler, Stop
from weft.sdk.sequence import Sequence

async def main(args):
    async with Sequence() as sequence:
        sequence.append([1, 2, 3, 4])
        count = 0
        async for part in sequence.generate(Sampler(temperature=0), Stop(max_tokens=args["tokens"], ignore_eos=True)):
            count += len(part.tokens)
        return count
'''

LOOP = '''
"""A fine-grained loop over a sequence: look at the 256 most probable tokens, take one, go on."""
from weft.sdk.sequence import Sequence

async def main(args):
    async with Sequence() as sequence:
        dist = await sequence.next_dist(256, append=[1, 2, 3, 4])
        for _ in range(args["tokens"] - 1):
            dist = await sequence.next_dist(256, append=[dist.max_index()])
        return args["tokens"]
'''

PAGES = '''
"""The paper's loop (section 4.2): embed, forward over explicit pages, look at the distribution."""
from weft.sdk.queues import Queue

async def main(args):
    async with Queue() as queue:
        pages = await queue.alloc_pages((args["tokens"] + 4) // 16 + 1)
        embeds = await queue.alloc_embeds(4)
        queue.embed_text([1, 2, 3, 4], [0, 1, 2, 3], embeds)
        queue.forward(pages[:1], embeds, pages[:1], embeds[:1])
        dist = await queue.next_dist(embeds[0])
        for position in range(4, args["tokens"] + 3):
            last = position // 16
            queue.embed_text([dist.max_index()], [position], embeds[:1])
            queue.forward(pages[: last + 1], embeds[:1], pages[last : last + 1], embeds[:1])
            dist = await queue.next_dist(embeds[0])
        return args["tokens"]
'''

ENQUEUE = '''
"""Calls that only enqueue, in batches, as a program makes them that does not wait."""
from weft.sdk import run
from weft.sdk.sequence import Sequence

async def main(args):
    for _ in range(args["calls"] // 100):
        sequence = Sequence()
        for _ in range(100):
            sequence.append([5])
        sequence.release()
        await run.sleep(0)
'''

ROUND_TRIPS = '''
"""One call after the other to an idle engine, each timed."""
from weft.sdk import run
from weft.sdk.queues import Queue

async def main(args):
    times = []
    async with Queue() as queue:
        for _ in range(args["calls"]):
            began = run.now()
            await queue.synchronize()
            times.append(run.now() - began)
    return sorted(times)[len(times) // 2]
'''

ACKNOWLEDGE = '''
"""Says that it has started, and waits to be told to end."""
from weft.sdk import run

async def main(args):
    run.send("started")
    await run.receive()
'''


def acknowledging_module() -> bytes:
    """The same as a core Wasm module. Its two commands are constant, and sent in one exchange that does not end."""
    commands = pack(Op.SEND, 1, b'"started"') + pack(Op.RECEIVE, 2)
    data = "".join(f"\\{byte:02x}" for byte in commands)
    text = f"""
    (module
      (import "weft" "exchange" (func $exchange (param i32 i32 f64) (result i32)))
      (memory (export "memory") 1)
      (data (i32.const 0) "{data}")
      (func (export "run")
        (drop (call $exchange (i32.const 0) (i32.const {len(commands)}) (f64.const 0)))
        (drop (call $exchange (i32.const 0) (i32.const 0) (f64.const -1)))))
    """
    return bytes(wasmtime.wat2wasm(text))
