"""Best of n: several answers are sampled in parallel and scored, and the conversation continues with the best one.

The score is the mean log-probability of the answer's tokens; any function of a generation will do, a model's judgement
too. The prompt is computed once, and the KV of the answer that is kept is the context's.

Arguments: `prompt` (what a user says), `n`, `temperature`, `seed`, `max_tokens`.
Returns the best text, and the scores of all in order.

Best-of-n sampling as in Learning to Summarize from Human Feedback (Stiennon et al., NeurIPS 2020).
"""

from weft.sdk import Context, Sampler, best_of


async def main(args):
    args = args or {}
    scores = {}

    def score(generation):
        known = [entry.logprob for entry in generation.logprobs]
        scores[generation.sampler.seed] = sum(known) / len(known)
        return scores[generation.sampler.seed]

    sampler = Sampler(temperature=args.get("temperature", 1.2), seed=args.get("seed", 1), logprobs=1)
    async with Context() as ctx:
        ctx.user(args.get("prompt", "Write a story about Ada and a lamp."))
        best = await best_of(ctx, args.get("n", 4), score, sampler=sampler, max_tokens=args.get("max_tokens", 64))
        return {"text": best.text, "scores": [scores[seed] for seed in sorted(scores)], "tokens": len(ctx.tokens)}
