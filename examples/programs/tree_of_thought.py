"""Tree of thought: the model proposes several next steps for each state; the program scores the resulting states and
keeps the best few, until one is a solution.

The task is the paper's game of 24: combine numbers with + - * / until one is left that is the target. A thought is one
line such as "13 - 9 = 4 (left: 4 10 4)". Proposals are sampled on forks, so the lines before are shared; a grammar sees
to it that they are legal and different; what they are worth is computed, which costs the model nothing.

Arguments: `numbers`, `target`, `breadth` (states that are kept), `proposals` (of each state), `seed`.
Returns the solution's lines (none: nothing was found), and how many thoughts were tried.

Tree of Thoughts: Deliberate Problem Solving with Large Language Models (Yao et al., NeurIPS 2023).
"""

from fractions import Fraction
from itertools import permutations

from weft.sdk import Context, Sampler, choice, gather


async def main(args):
    args = args or {}
    numbers, target = [Fraction(n) for n in args.get("numbers", [4, 9, 10, 13])], Fraction(args.get("target", 24))
    seed, tried = args.get("seed", 1), 0
    root = Context().fill(f"Numbers: {' '.join(map(str, numbers))}. Make {target}.\n")
    states = [(root, numbers, [])]
    for depth in range(len(numbers) - 1):
        sampler = Sampler(temperature=2.0, seed=seed + depth)
        proposed = await gather([propose(state, args.get("proposals", 12), sampler) for state in states])
        found = {tuple(sorted(left)): (ctx, left, lines) for state in proposed for ctx, left, lines in state}
        tried += sum(map(len, proposed))
        ranked = sorted(found.values(), key=lambda state: distance(state[1], target))
        states = ranked[: args.get("breadth", 5)]
        kept = [ctx for ctx, _, _ in states]
        for ctx in [ctx for state in proposed for ctx, _, _ in state if ctx not in kept]:
            ctx.drop()
    solved = [lines for _, left, lines in states if left == [target]]
    return {"solution": solved[0] if solved else None, "tried": tried}


async def propose(state, count, sampler):
    """Different next steps from a state, each on a fork of its own."""
    before, numbers, lines = state
    steps, proposed = dict(legal(numbers)), []
    while steps and len(proposed) < count:
        ctx = before.fork()
        step = (await ctx.generate(sampler, grammar=choice(list(steps)), max_tokens=24)).text
        result, left = steps.pop(step)
        line = f"{step} = {result} (left: {' '.join(map(str, left))})"
        proposed.append((ctx.fill(line.removeprefix(step) + "\n"), left, [*lines, line]))
    return proposed


def legal(numbers):
    """All next steps, each with its result and the numbers that it leaves."""
    for one, two in permutations(range(len(numbers)), 2):
        a, b = numbers[one], numbers[two]
        rest = [n for at, n in enumerate(numbers) if at not in (one, two)]
        for sign, result in results(a, b):
            yield f"{a} {sign} {b}", (result, [*rest, result])


def results(a, b):
    """What two numbers make."""
    return [("+", a + b), ("-", a - b), ("*", a * b), *([("/", a / b)] if b else [])]


def distance(numbers, target):
    """How near the numbers come to the target when they are taken from left to right, in the best order."""
    return min(abs(value - target) for order in permutations(numbers) for value in folded(order))


def folded(numbers):
    """All that numbers make from left to right."""
    reached = {numbers[0]}
    for number in numbers[1:]:
        reached = {result for before in reached for _, result in results(before, number)}
    return reached
