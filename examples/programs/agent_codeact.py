"""CodeACT: the model's actions are code. Generated code becomes the source of a child program, which runs in the
sandbox with little time and no network; its result, or its error, is appended to the same context.

Arguments: `question`, `max_rounds`, `cpu_s` (of each child).
Returns the answer and every piece of code with what came of it.

Executable Code Actions Elicit Better LLM Agents (Wang et al., ICML 2024).
"""

from weft.sdk import Context, InvalidRequest, LimitExceeded, ProgramFailed, greedy, messaging
from weft.sdk.run import send

# The embedded model writes expressions; one that writes whole functions would be given a tool for those.
EVALUATE = {
    "type": "function",
    "function": {
        "name": "evaluate",
        "description": "Compute the value of an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


async def main(args):
    args = args or {}
    steps = []
    async with Context(tools=[EVALUATE], sampler=greedy()) as ctx:
        ctx.user(args.get("question", "There are 14 boxes with 23 pens each. How many are there in all?"))
        async for call in ctx.tool_calls(args.get("max_rounds", 4), max_tokens=64):
            result = await run(str(call.arguments.get("expression", "")), args.get("cpu_s", 2.0))
            ctx.tool(call, result)
            steps.append([call.text, result])
            send(steps[-1])
        return {"answer": ctx.last_text, "steps": steps}


async def run(code, cpu_s):
    """What a program that returns the value of the code returns, as text."""
    child = messaging.launch(source=f"def main():\n    return (\n{code}\n)", limits={"cpu_s": cpu_s, "network": []})
    try:
        return str(await child.join())
    except (InvalidRequest, ProgramFailed, LimitExceeded) as error:
        return f"Error: {error}"
