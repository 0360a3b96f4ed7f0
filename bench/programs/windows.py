"""The uploaded program: a long text with full, windowed or sink attention on explicit pages. It uses `weft.sdk` only.

As `examples/programs/windowed_attention.py` and `attention_sink.py`, with a token sampled in the same call that
computes the one before. The prompt is within the window.
"""

from __future__ import annotations

import time
from typing import Any

from bench.programs.applications import words
from weft.sdk import own_model
from weft.sdk.queues import Queue
from weft.sdk.sampling import Stop, greedy
from weft.sdk.sequence import Sequence

KINDS = ("generate", "full", "window", "sink")
"""The fused loop of a `Sequence` with full attention; then the same on explicit pages, and two that see less."""


async def main(args: dict[str, Any]) -> dict[str, Any]:
    if args["kind"] == "generate":
        return await fused(args)
    size, sampler = (await own_model()).page_size, greedy()
    sinks = args["sinks"] if args["kind"] == "sink" else 0
    window = args["window"] if args["kind"] != "full" else args["prompt"] + args["tokens"]
    fed, positions = words(args["prompt"], args["seed"]), list(range(args["prompt"]))
    most = generated = 0
    began = time.time()
    async with Queue() as queue:
        pages = dict(enumerate(queue.alloc_pages(-(-len(fed) // size))))
        write = list(pages.values())
        place = len(fed)
        while generated < args["tokens"]:
            token = await queue.forward_sample(
                fed, positions, read=list(pages.values()), write=write, sampler=sampler, index=generated
            )
            if not generated:
                began = time.time()
            generated += 1
            gone = place - window
            if gone >= sinks:
                number = gone // size
                hidden = [sinks <= at <= gone for at in range(number * size, (number + 1) * size)]
                if all(hidden):
                    queue.free_pages(pages.pop(number))
                elif number < place // size:
                    queue.mask_page(pages[number], hidden)
            if place % size == 0:
                pages[place // size] = queue.alloc_pages(1)[0]
            most = max(most, len(pages))
            fed, positions, write = [token], [place], [pages[place // size]]
            place += 1
    return {"generated": generated, "seconds": time.time() - began, "pages": most}


async def fused(args: dict[str, Any]) -> dict[str, Any]:
    generated, began = 0, time.time()
    async with Sequence() as seq:
        seq.append(words(args["prompt"], args["seed"]))
        stop = Stop(max_tokens=args["tokens"], ignore_eos=True)
        async for part in seq.generate(greedy(), stop, text=False):
            if not generated:
                began = time.time()
            generated += len(part.tokens)
    size = (await own_model()).page_size
    pages = -(-(args["prompt"] + generated) // size)
    return {"generated": generated, "seconds": time.time() - began, "pages": pages}
