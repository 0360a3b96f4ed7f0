"""Swarm: several agents that know each other by name only, and cooperate by messages.

A coordinator hands problems out over a topic of each worker and hears of results on another; workers solve each
problem with a calculator, in a context of their own; at last the coordinator has one of them add all up. Started under
a name (`program`), workers are programs of their own; else they are tasks of this one. The messages are the same.

Arguments: `problems` (texts), `workers` (how many), `program` (the name that this file is uploaded under).
Returns the total, what each problem came to, and who solved it.

The inter-agent workflow of Pie (section 7.1), after Language Agents as Optimizable Graphs (Zhuge et al., ICML 2024).
"""

import asyncio
import random
import re

from weft.sdk import Context, greedy, messaging, tool

PROBLEMS = [
    "There are 14 boxes with 23 pens each. How many are there in all?",
    "A shelf holds 31 books. How many books do 17 shelves hold?",
    "I walk 12 miles each day for 19 days. How far is that?",
    "I buy 21 cups at 13 dollars each. What do I pay?",
]


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    left, sign, right = re.fullmatch(r"(\d+) ([-+*]) (\d+)", expression).groups()
    return str({"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right)))


async def main(args):
    args = args or {}
    if "worker" in args:
        return await work(args["team"], args["worker"])
    team = f"swarm-{random.getrandbits(64):x}"
    problems, names = args.get("problems", PROBLEMS), [f"worker{at}" for at in range(args.get("workers", 3))]
    async with messaging.subscribe(f"{team}/results") as results:
        agents = [start(args.get("program"), team, name) for name in names]
        for _ in names:
            await results.get()  # each says that it listens
        for at, problem in enumerate(problems):
            messaging.broadcast(f"{team}/{names[at % len(names)]}", {"id": at, "problem": problem})
        solved = sorted([(await results.get()).value for _ in problems], key=lambda result: result["id"])
        total = solved[0]["value"]
        for result in solved[1:]:
            sum_up = {"id": -1, "problem": f"What is {total} plus {result['value']}?"}
            messaging.broadcast(f"{team}/{names[0]}", sum_up)
            total = (await results.get()).value["value"]
        for name in names:
            messaging.broadcast(f"{team}/{name}", None)
        counts = await asyncio.gather(*agents)
    return {"total": total, "solved": solved, "counts": dict(zip(names, counts, strict=True))}


def start(program, team, name):
    """A worker; awaited, how many problems it solved."""
    if program is None:
        return asyncio.ensure_future(work(team, name))
    return messaging.launch(program, args={"team": team, "worker": name}).join()


async def work(team, name):
    """Solve what is sent, until nothing is."""
    count = 0
    async with messaging.subscribe(f"{team}/{name}") as inbox, Context(tools=[calculator], sampler=greedy()) as base:
        messaging.broadcast(f"{team}/results", {"ready": name})
        async for message in inbox:
            if message.value is None:
                return count
            async with base.fork() as ctx:
                answer = await ctx.user(message.value["problem"]).run_tools(max_tokens=64)
            value = int(re.findall(r"\d+", answer)[-1])
            messaging.broadcast(f"{team}/results", {"id": message.value["id"], "by": name, "value": value})
            count += 1
