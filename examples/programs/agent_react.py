"""ReAct: the model alternates between reasoning and tool calls until it answers, in one context whose KV stays while
the tools run.

Tools: a calculator in the program itself, a table in the tenant's store, and the weather from a web service.

Arguments: `question`, `table` (an object, put into the store first), `weather_url` (of a service that answers
`?city=...`; the run's network limit has to allow it), `max_rounds`.
Returns the answer and every step: tool, arguments, result.

ReAct: Synergizing Reasoning and Acting in Language Models (Yao et al., ICLR 2023).
"""

import ast
import operator

from weft.sdk import Context, greedy, http, run, store, tool
from weft.sdk.toolbox import execute

SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return f"{value_of(ast.parse(expression, mode='eval').body):g}"


@tool
async def lookup(key: str) -> object:
    """Look up the value of a key."""
    value = await store.get_json(f"table/{key}")
    return "nothing" if value is None else value


@tool
async def weather(city: str) -> str:
    """Current weather in a city."""
    return (await http.get(f"{run.args()['weather_url']}?city={city}")).check().text


async def main(args):
    args = args or {}
    for key, value in args.get("table", {"rate_kolm": 58}).items():
        await store.put_json(f"table/{key}", value)
    tools = [calculator, *([weather] if "weather_url" in args else []), lookup]
    steps = []
    async with Context(tools=tools, sampler=greedy()) as ctx:
        ctx.user(args.get("question", "What is the value of rate_kolm times 12?"))
        async for call in ctx.tool_calls(args.get("max_rounds", 6), max_tokens=64):
            result = await execute(call, ctx.runnable_tools)
            ctx.tool(call, result)
            steps.append([call.name, call.arguments, result])
            run.send(steps[-1])
        return {"answer": ctx.last_text, "steps": steps}


def value_of(node):
    """Of an expression of numbers and signs; anything else is no arithmetic."""
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    raise ValueError("write numbers and the signs + - * / only")
