"""Skeleton of thought: first an outline of the answer in a few words, then every point in parallel, on forks that share
the outline's KV. The answer takes as long as its longest point.

Arguments: `list` (of what the answer is to be about, with prices), `hero` (of the stories that the points become),
`max_tokens` (of each point). Returns the points and the text of each.

Skeleton-of-Thought: Prompting LLMs for Efficient Parallel Generation (Ning et al., ICLR 2024).
"""

import re

from weft.sdk import Context, greedy, map_forks


async def main(args):
    args = args or {}
    hero = args.get("hero", "Ada")
    async with Context(sampler=greedy()) as ctx:
        ctx.user(f"List: {args.get('list', 'lamp: $4, kite: $2, drum: $9')}\nName all items.")
        skeleton = await ctx.generate(max_tokens=48)
        points = re.split(", | and ", skeleton.text.removeprefix("The items are ").removesuffix("."))

        async def write(fork, point):
            fork.user(f"Write a story about {hero} and a {point}.")
            return (await fork.generate(max_tokens=args.get("max_tokens", 96))).text

        texts = await map_forks(ctx, write, points)
    return {"skeleton": skeleton.text, "points": points, "texts": texts}
