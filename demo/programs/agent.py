"""An agent with one tool."""

from typing import Any

from weft.sdk import Context, greedy, tool


@tool
async def weather(city: str) -> str:
    """Current weather in a city."""
    return f"sunny, {len(city) + 17} degrees"


async def main(args: dict[str, Any]) -> dict[str, Any]:
    """Answer `args["question"]`; return the answer and the arguments of each call of the tool."""
    calls = []
    async with Context(tools=[weather], sampler=greedy()) as ctx:
        ctx.user(args["question"])
        async for call in ctx.tool_calls(max_rounds=4):
            calls.append(call.arguments)
            ctx.tool(call, await weather(**call.arguments))
        return {"calls": calls, "answer": ctx.last_text}
