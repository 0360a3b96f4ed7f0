"""Contrastive decoding between two prompts: one with a document, one without. Tokens that are probable with the
document and improbable without it are preferred, so the answer comes from the document.

Each token maximises (1 + weight) * log p(with) - weight * log p(without) among those at least `plausible` times as
probable as the likeliest one with the text. Both prompts are sequences of one model, computed in the same batch.

Arguments: `text`, `question`, `weight` (0: greedy decoding), `plausible`, `max_tokens`.
Returns the answer and its tokens, and the answer that greedy decoding would give.

Contrastive Decoding (Li et al., ACL 2023), with the two prompts of Context-aware Decoding (Shi et al., NAACL 2024).
"""

import asyncio
import math

from weft.sdk import Context, Sequence, detokenize, greedy, own_model, render, tokenize


async def main(args):
    args = args or {}
    text = args.get("text", "You are called Otto.")
    question = args.get("question", "Who are you?")
    weight, floor = args.get("weight", 0.5), math.log(args.get("plausible", 0.1))
    model = await own_model()
    prompts = [await render([{"role": "user", "content": said}]) for said in (f"{text}\n\n{question}", question)]
    fed = [await tokenize(prompt) for prompt in prompts]
    written = []
    async with Sequence() as informed, Sequence() as blind:
        while len(written) < args.get("max_tokens", 24):
            likely, other = await asyncio.gather(informed.next_dist(append=fed[0]), blind.next_dist(append=fed[1]))
            scores = {
                # What is not among the known ones is no likelier than the last of them.
                token: (1 + weight) * logprob - weight * max(other.logprob(token), other.logprobs[-1])
                for token, logprob in likely
                if logprob >= floor + likely.logprobs[0]
            }
            token = max(scores, key=scores.get)
            if token in model.eos_token_ids:
                break
            written.append(token)
            fed = [[token], [token]]
    async with Context() as ctx:
        plain = await ctx.fill(prompts[0]).generate(greedy(), max_tokens=args.get("max_tokens", 24))
    return {"text": await detokenize(written), "tokens": written, "greedy": plain.text}
