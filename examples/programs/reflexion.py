"""Reflexion: the program tries a task, evaluates the result, describes the failure, and tries again with this
reflection in its prompt. Reflections are kept in the tenant's store, so the next run begins with them.

Arguments: `text`, `keys` (of the JSON record to extract), `trials`, `memory` (the name of what is learned), `seed`.
Returns the record (none: no trial was right), the trials, and what was learned.

Reflexion: Language Agents with Verbal Reinforcement Learning (Shinn et al., NeurIPS 2023).
"""

import json

from weft.sdk import Context, Sampler, store

TEXT = "Szczepan, a goldsmith of 83 years, settled in Quetzaltenango long ago."


async def main(args):
    args = args or {}
    text, keys = args.get("text", TEXT), args.get("keys", ["name", "city", "age", "job"])
    memory = f"reflexion/{args.get('memory', 'extract')}"
    learned = await store.get_json(memory, [])
    trials = []
    for trial in range(args.get("trials", 6)):
        async with Context(system=" ".join(["You extract data as JSON.", *learned])) as ctx:
            ctx.user(f"Extract {', '.join(keys)} as JSON: {text}")
            sampler = Sampler(temperature=0.9, seed=args.get("seed", 1) + trial)
            said = (await ctx.generate(sampler, max_tokens=64)).text
        lesson = evaluate(said, text, keys)
        trials.append({"said": said, "lesson": lesson})
        if lesson is None:
            return {"record": json.loads(said), "trials": trials, "learned": learned}
        if lesson not in learned:
            learned.append(lesson)
            await store.put_json(memory, learned)
    return {"record": None, "trials": trials, "learned": learned}


def evaluate(said, text, keys):
    """What is wrong with an answer, as advice; None if nothing is."""
    try:
        record = json.loads(said)
    except ValueError:
        return "Answer with a JSON object and nothing else."
    if not isinstance(record, dict) or sorted(record) != sorted(keys):
        return f"Use the keys {', '.join(keys)}."
    wrong = [key for key, value in record.items() if str(value) not in text]
    return f"Copy {wrong[0]} from the text." if wrong else None
