"""Output validation: a regular expression is matched while the model generates, and generation stops at the first
invalid token; the context is rewound and the model tries again. The last try uses the expression as a grammar, so there
is always a valid answer.

Arguments: `prompt` (what a user says), `pattern`, `tries`, `temperature`, `seed`, `max_tokens`.
Returns the text, how many tries it took, whether the last one was constrained, and the tokens that were thrown away.

Validating Large Language Models with ReLM (Kuchnik et al., MLSys 2023).
"""

from weft.sdk import Context, Matcher, Sampler, greedy, own_model, regex

PATTERN = r'\{"name": "[A-Z][a-z]+", "age": [1-9][0-9]?\}'


async def main(args):
    args = args or {}
    grammar, max_tokens = regex(args.get("pattern", PATTERN)), args.get("max_tokens", 64)
    sampler = Sampler(temperature=args.get("temperature", 0.9), seed=args.get("seed", 1))
    wasted, tries = 0, args.get("tries", 4)
    async with Context() as ctx:
        ctx.user(args.get("prompt", "Extract name, age as JSON: Nora lives in Oslo. She is 34 years old."))
        start = await ctx.snapshot()
        for attempt in range(tries):
            generation = ctx.generate(sampler.replace(seed=sampler.seed + attempt), max_tokens=max_tokens)
            if await is_valid(generation, grammar):
                return {"text": generation.text, "tries": attempt + 1, "constrained": False, "wasted": wasted}
            wasted += len(generation.tokens)
            await ctx.rewind(start)
        generation = await ctx.generate(greedy(), max_tokens=max_tokens, grammar=grammar)
        return {"text": generation.text, "tries": tries + 1, "constrained": True, "wasted": wasted}


async def is_valid(generation, grammar):
    """Read it as long as it may be right; else end it."""
    ends = (await own_model()).eos_token_ids
    async with Matcher(grammar) as matcher:
        allowed = await matcher.push()
        async for token in generation.each_token():
            if token not in allowed:
                await generation.cancel()
                return False
            if token in ends:
                return True
            allowed = await matcher.push([token])
        return allowed.done or any(end in allowed for end in ends)
