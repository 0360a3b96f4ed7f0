"""Greedy decoding by hand, one distribution at a time, over explicit pages."""

from typing import Any

from weft.sdk import Queue, tokens


async def main(args: dict[str, Any]) -> str:
    """Prompt, then as many tokens."""
    prompt = await tokens.tokenize(args["prompt"])
    async with Queue() as queue:
        pages = await queue.alloc_pages((len(prompt) + args["tokens"]) // 8 + 1)
        embeds = await queue.alloc_embeds(len(prompt))
        queue.embed_text(prompt, range(len(prompt)), embeds)
        queue.forward(pages, embeds, pages, embeds[:1])
        chosen: list[int] = []
        while len(chosen) < args["tokens"]:
            chosen.append((await queue.next_dist(embeds[0], 1)).max_index())
            queue.embed_text(chosen[-1:], [len(prompt) + len(chosen) - 1], embeds[:1])
            queue.forward(pages, embeds[:1], pages, embeds[:1])
        return await tokens.detokenize(chosen)
