"""Self-consistency: the same question is answered several times with sampling, and the most frequent answer is
returned. All samples continue one prompt, which is computed once.

Arguments: `prompt` (what a user says), `samples`, `temperature`, `seed`, `max_tokens`.
Returns the answer and the votes for each.

Self-Consistency Improves Chain of Thought Reasoning in Language Models (Wang et al., ICLR 2023).
"""

from collections import Counter

from weft.sdk import Context, Sampler, map_forks

PROMPT = "The train to Rome leaves at 7. The train to Oslo leaves at 9.\n\nWhen does the train to Oslo leave?"


async def main(args):
    args = args or {}
    temperature, seed = args.get("temperature", 0.9), args.get("seed", 1)

    async def answer(fork, number):
        sampler = Sampler(temperature=temperature, seed=seed + number)
        return (await fork.generate(sampler, max_tokens=args.get("max_tokens", 32))).answer.strip()

    async with Context() as ctx:
        ctx.user(args.get("prompt", PROMPT))
        answers = await map_forks(ctx, answer, range(args.get("samples", 8)))
    votes = Counter(answers)
    return {"answer": votes.most_common(1)[0][0], "votes": dict(votes.most_common())}
