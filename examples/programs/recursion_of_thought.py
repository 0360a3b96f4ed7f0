"""Recursion of thought: a problem that is too large for one context is divided; the same function solves each part in a
separate context, and only the answer is returned. Contexts stay short, and independent parts are solved in parallel.

The problems are nested arithmetic. A model that was trained for it says itself where to divide; the embedded one was
not, so the program divides at the operands, and the model solves each step with a calculator.

Arguments: `problem` (an expression of whole numbers with + - * and brackets), `max_depth`.
Returns the value, the number of contexts, the length of the longest (in tokens), and every step.

Recursion of Thought: A Divide-and-Conquer Approach to Multi-Context Reasoning (Lee and Kim, ACL Findings 2023).
"""

import ast
import re

from weft.sdk import Context, InvalidRequest, gather, greedy, tool


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    left, sign, right = re.fullmatch(r"(-?\d+) ([-+*]) (-?\d+)", expression).groups()
    return str({"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right)))


async def main(args):
    args = args or {}
    problem = args.get("problem", "((14 + 38) * (17 - 12)) - (18 * (9 + 4))")
    steps = []

    async def solve(node, depth):
        if isinstance(node, ast.Constant):
            return node.value
        if depth == 0:
            raise InvalidRequest("the problem is nested deeper than max_depth allows", "max_depth")
        left, right = await gather([solve(node.left, depth - 1), solve(node.right, depth - 1)])
        sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(node.op)]
        async with Context(tools=[calculator], sampler=greedy()) as ctx:
            answer = await ctx.user(f"What is {left} {sign} {right}?").run_tools(max_tokens=64)
            steps.append([answer, len(ctx.tokens)])
        return int(re.findall(r"-?\d+", answer)[-1])

    value = await solve(ast.parse(problem, mode="eval").body, args.get("max_depth", 5))
    longest = max(length for _, length in steps)
    return {"value": value, "contexts": len(steps), "longest": longest, "steps": [answer for answer, _ in steps]}
