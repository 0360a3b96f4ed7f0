"""Text completion: the model continues a text, and every piece is sent to the client as soon as it is final.

Arguments: `prompt` (the text to go on with), `max_tokens`, `temperature` (0: always the likeliest token), `seed`.
Returns the text, why it ended, and what it cost.

The first row of Table 2 of Pie (Gim et al., SOSP 2025).
"""

from weft.sdk import Context, Sampler, run


async def main(args):
    args = args or {}
    sampler = Sampler(temperature=args.get("temperature", 0.8), seed=args.get("seed", 1))
    async with Context() as ctx:
        ctx.fill(args.get("prompt", "Once there was a fox named Ada"))
        generation = ctx.generate(sampler, max_tokens=args.get("max_tokens", 64))
        async for piece in generation:
            run.send(piece)
        usage = generation.usage
        return {
            "text": generation.text,
            "reason": generation.reason,
            "prompt_tokens": usage.num_prompt_tokens,
            "output_tokens": usage.num_output_tokens,
        }
