"""Greedy decoding written out: a forward pass over explicit KV pages and a look at the distribution for each token."""

from typing import Any

from weft.sdk import Queue, own_model, render, tokens


async def main(args: dict[str, Any]) -> str:
    """Answer `args["question"]` in at most `args["tokens"]` tokens."""
    model = await own_model()
    prompt = await tokens.tokenize(await render([{"role": "user", "content": args["question"]}]))
    chosen: list[int] = []
    async with Queue() as queue:
        pages = await queue.alloc_pages((len(prompt) + args["tokens"]) // model.page_size + 1)
        embeds = await queue.alloc_embeds(len(prompt))
        queue.embed_text(prompt, range(len(prompt)), embeds)
        queue.forward(pages, embeds, pages, embeds[:1])
        while len(chosen) < args["tokens"]:
            token = (await queue.next_dist(embeds[0], 1)).max_index()
            if token in model.eos_token_ids:
                break
            chosen.append(token)
            queue.embed_text([token], [len(prompt) + len(chosen) - 1], embeds[:1])
            queue.forward(pages, embeds[:1], pages, embeds[:1])
    return await tokens.detokenize(chosen)
