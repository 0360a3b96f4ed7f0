"""What runs while the image is made: a program that goes the ways most programs go, and a host that answers it.

CPython rewrites the code that it runs into forms for the types it meets, and computes and allocates much the first
time. All of that is part of the image afterwards: no instance does it again, nor has pages of its own for it.
"""

import json
import struct

from weft.abi.frames import EventKind, commands, pack_event
from weft.abi.operations import Op

PROGRAM = """
import asyncio
from weft.sdk import Context, Queue, Sequence, Stop, gather, greedy, run, store, tokenize

class Error(Exception): pass

async def step(n):
    await asyncio.sleep(0)
    return n

async def over_distributions():
    async with Sequence() as sequence:
        dist = await sequence.next_dist(8, append=[1, 2, 3])
        for _ in range(8):
            sequence.append([dist.max_index()])
            dist = await sequence.next_dist(8, append=[dist.sample(0.5)])

async def over_pages():
    async with Queue() as queue:
        pages, embeds = await queue.alloc_pages(2), await queue.alloc_embeds(4)
        for position in range(8):
            queue.embed_text([5], [position], embeds[:1])
            queue.forward(pages[:1], embeds[:1], pages[1:], embeds[:1])
            dist = await queue.next_dist(embeds[0])
            token = await queue.forward_sample([dist.ids[0]], [position], read=pages, write=pages[:1], sampler=greedy())
        queue.free_pages(pages)
        await queue.synchronize()

async def over_parts():
    async with Sequence() as sequence:
        sequence.append(await tokenize("warm"))
        async for part in sequence.generate(greedy(), Stop(max_tokens=4)):
            part.tokens, part.text

async def over_text():
    async with Context() as ctx:
        ctx.fill("warm")
        fork = ctx.fork()
        return [(await one.generate(max_tokens=4)).text for one in (ctx, fork)]

async def main(args):
    print("warm")
    await asyncio.gather(*(step(n) for n in range(3)))
    await gather([over_distributions(), over_pages(), over_parts(), over_text()])
    await store.put_json("warm", await store.get_json("warm", 0))
    await run.sleep(0.0)
    run.send(args)
    if args: raise Error("warm")
    return {"a": [1, 2.5, "x"]}
"""

_IDS, _LOGPROBS = struct.pack("<8i", *range(300, 308)), struct.pack("<8f", *(-1.0 - n for n in range(8)))
_MODEL = {"name": "warm", "traits": ["Sequence"], "page_size": 16, "eos_token_ids": [2]}
_ANSWERS = {
    Op.SLEEP: (),
    Op.MODELS: (json.dumps([_MODEL]).encode(),),
    Op.TOKENIZE: (_IDS,),
    Op.DETOKENIZE: (b"warm",),
    Op.SEQ_DIST: (_IDS, _LOGPROBS),
    Op.SEQ_GENERATE: (b'{"reason": "length", "stop": null, "usage": {"num_output_tokens": 8}}',),
    Op.STORE_PUT: (),
    Op.STORE_GET: (b"\1", b"1"),
    Op.QUEUE_SYNC: (),
    Op.PAGES_ALLOC: (),
    Op.EMBEDS_ALLOC: (),
    Op.FORWARD_SAMPLE: (_IDS[:4],),
    Op.NEXT_DIST: (_IDS, _LOGPROBS, b""),
}


class Host:
    """Answers each call at once, and the same each time."""

    def now(self):
        """A constant clock, as runner.wit declares."""
        return 1e9

    def exchange(self, said, timeout):
        """Answer commands at once, as runner.wit declares."""
        events = []
        for op, call, _, _ in commands(said.encode("latin-1")):
            if op is Op.SEQ_GENERATE:
                events.append(pack_event(EventKind.PART, call, _IDS, b"warm"))
            if op in _ANSWERS:
                events.append(pack_event(EventKind.RESULT, call, *_ANSWERS[op]))
        return b"".join(events).decode("latin-1")
