"""Monte Carlo tree search over sentences: a node is the beginning of a story, its children add one sentence each, and
its value is the mean score of stories that begin with it.

Each round walks down by upper confidence bounds, adds a sentence, writes the story to its end on a fork, and tells all
nodes on the way what it was worth. Nodes are contexts: going on from one costs its new tokens only.

Arguments: `prompt`, `words` (that the story should have; its worth is their share), `rounds`, `width` (children of a
node), `explore` (the weight of what is little known), `temperature`, `seed`.
Returns the best story with its worth, what greedy decoding is worth, and the number of nodes; sends every story.

Language Agent Tree Search (Zhou et al., ICML 2024); the bounds are UCT's (Kocsis and Szepesvari, ECML 2006).
"""

import math
from dataclasses import dataclass, field

from weft.sdk import Context, Sampler, greedy, run


@dataclass
class Node:
    """The beginning of a story."""

    ctx: Context
    text: str = ""
    ended: bool = False
    children: list = field(default_factory=list)
    visits: int = 0
    total: float = 0.0

    def bound(self, visits, explore):
        """What it may be worth at best."""
        return self.total / self.visits + explore * math.sqrt(math.log(visits) / self.visits)


async def main(args):
    args = args or {}
    words, seed = args.get("words", ["Nora", "Max", "kite", "stranger", "drawer"]), args.get("seed", 1)
    width, explore = args.get("width", 3), args.get("explore", 0.5)

    def worth(text):
        return sum(word in text for word in words) / len(words)

    root = Node(Context().user(args.get("prompt", "Tell a story with Nora, Max and a kite.")))
    plain = await finish(root, greedy())
    best, count = plain, 1
    for number in range(args.get("rounds", 16)):
        path = [root]
        while len(path[-1].children) == width and not path[-1].ended:
            above = path[-1]
            path.append(max(above.children, key=lambda child: child.bound(above.visits, explore)))
        sampler = Sampler(temperature=args.get("temperature", 1.0), seed=seed + number)
        if not path[-1].ended:
            path.append(await grow(path[-1], sampler))
            count += 1
        leaf = path[-1]
        story = leaf.text if leaf.ended else await finish(leaf, sampler)
        run.send({"story": story, "worth": worth(story)})
        best = max(best, story, key=worth)
        for node in path:
            node.visits += 1
            node.total += worth(story)
    return {"text": best, "worth": worth(best), "greedy": worth(plain), "nodes": count, "rounds": root.visits}


async def finish(node, sampler):
    """The story that begins with a node, written to its end on a fork."""
    async with node.ctx.fork() as fork:
        return node.text + (await fork.generate(sampler, max_tokens=120)).text


async def grow(node, sampler):
    """A child with one sentence more."""
    ctx = node.ctx.fork()
    # With its space: a full stop alone is another token, the one that ends stories.
    sentence = await ctx.generate(sampler, stop=". ", max_tokens=40)
    ended = sentence.stop is None
    if not ended:
        ctx.fill(". ")
    child = Node(ctx, node.text + sentence.text + ("" if ended else ". "), ended)
    node.children.append(child)
    return child
