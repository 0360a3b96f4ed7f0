"""Graph of thought: thoughts are vertices of a graph. Some are generated from one earlier thought, and the best of
several is kept; others aggregate several thoughts, which chains and trees cannot express.

Of each note several drafts of the names in it are generated and scored (how many stand in the note?), and the best is
kept. Then the lists are merged, two by two: of each merger several drafts again, the best one kept, and refined under a
grammar where it is not right.

Arguments: `notes` (each a list of things with their prices), `drafts` (of each thought), `seed`.
Returns the last list, and the graph: every thought with those it came from, its score, and how it was made.

Graph of Thoughts: Solving Elaborate Problems with Large Language Models (Besta et al., AAAI 2024).
"""

import re

from weft.sdk import Context, Sampler, choice, gather

NOTES = ["bread: $4, milk: $2", "cheese: $9, honey: $7", "soap: $3, tea: $5", "rice: $6, salt: $1"]


async def main(args):
    args = args or {}
    num_drafts, seed = args.get("drafts", 3), args.get("seed", 1)
    graph = []

    async def think(entries, sources, grammar=None):
        """A list of the names in some entries, the best of several drafts, as a vertex of the graph."""
        async with Context() as ctx:
            await ctx.user(f"List: {', '.join(entries)}\nName all items.").flush(add_generation_prompt=True)
            asked = [draft(ctx.fork(), seed + at, grammar) for at in range(num_drafts)]
            drafts = await gather(asked)
        best = max(drafts, key=lambda text: score(text, entries))
        vertex = {"id": len(graph), "from": sources, "text": best, "score": score(best, entries), "drafts": drafts}
        graph.append(vertex)
        return vertex | {"entries": entries}

    async def refine(thought, sources):
        """The same thought under a grammar: the names that those it came from have, each once."""
        if thought["score"] == 1.0:
            return thought
        known = [name for source in sources for name in names(source["text"])]
        right = [name for name in dict.fromkeys(known) if name in wanted(thought["entries"])]
        line = f"The items are {', '.join(right[:-1])} and {right[-1]}."
        return await think(thought["entries"], [source["id"] for source in (thought, *sources)], choice([line]))

    async def read(note):
        thought = await think(note.split(", "), [])
        return await refine(thought, [thought])

    async def merge(one, two):
        thought = await think(one["entries"] + two["entries"], [one["id"], two["id"]])
        return await refine(thought, [one, two])

    level = await gather([read(note) for note in args.get("notes", NOTES)])
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = await gather([merge(one, two) for one, two in pairs]) + (level[-1:] if len(level) % 2 else [])
    return {"text": level[0]["text"], "names": names(level[0]["text"]), "graph": graph}


async def draft(fork, seed, grammar):
    """One draft of a thought."""
    async with fork:
        return (await fork.generate(Sampler(temperature=0.6, seed=seed), grammar=grammar, max_tokens=64)).text


def names(text):
    """The names in a list that the model wrote."""
    return re.split(", | and ", text.removeprefix("The items are ").removesuffix("."))


def score(text, entries):
    """How many of the names are named, and nothing else."""
    right, found = wanted(entries), names(text)
    return len(set(right) & set(found)) / max(len(right), len(found))


def wanted(entries):
    """The names in entries."""
    return [entry.split(":")[0] for entry in entries]
