"""Watermarking: each token is sampled with a bias towards a "green" part of the vocabulary that depends on the previous
token and a key. With the key the text can be detected; without it no difference is visible.

Arguments: `prompt` (the text to go on with), `key`, `max_tokens`, `bias` (added to log-probabilities of green tokens;
0 leaves no mark), `share` (of the vocabulary that is green), `seed`; or `detect` (a text or a list of tokens to test).
Returns the text, its tokens, how many are green, and the p-value: how probable so many are in a text without the mark.

A Watermark for Large Language Models (Kirchenbauer et al., ICML 2023).
"""

import math
import random
from itertools import pairwise

from weft.sdk import Dist, Sequence, detokenize, own_model, tokenize

MASK = (1 << 64) - 1


async def main(args):
    args = args or {}
    key, share = args.get("key", 15485863), args.get("share", 0.25)
    if "detect" in args:
        tokens = args["detect"] if isinstance(args["detect"], list) else await tokenize(args["detect"])
        return detect(tokens, key, share)
    bias, rng = args.get("bias", 4.0), random.Random(args.get("seed", 1))
    model = await own_model()
    tokens = await tokenize(args.get("prompt", "Once there was a fox named Ada"), special=True)
    start, fed = len(tokens), tokens
    async with Sequence() as seq:
        while len(tokens) - start < args.get("max_tokens", 180):
            dist = await seq.next_dist(append=fed)
            biased = [
                (token, logprob + bias * is_green(tokens[-1], token, key, share))
                for token, logprob in dist
                if token not in model.eos_token_ids
            ]
            chosen = Dist(*zip(*biased, strict=True)).sample(args.get("temperature", 1.0), rng)
            tokens, fed = [*tokens, chosen], [chosen]
    written = tokens[start:]
    return {"text": await detokenize(written), "tokens": written, **detect(written, key, share)}


def is_green(before, token, key, share):
    """A coin with the given share that falls the same way for the same pair (the mixing step of splitmix64)."""
    value = (key + before * 0x9E3779B97F4A7C15 + token * 0xD1B54A32D192ED03) & MASK
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        value = ((value ^ value >> 29) * factor) & MASK
    return (value ^ value >> 32) & 0xFFFFFFFF < share * (1 << 32)


def detect(tokens, key, share):
    """Pairs are counted once each: a text that repeats itself proves nothing by it."""
    pairs = set(pairwise(tokens))
    green = sum(is_green(before, token, key, share) for before, token in pairs)
    deviation = math.sqrt(len(pairs) * share * (1 - share)) or 1.0
    p_value = 0.5 * math.erfc((green - share * len(pairs)) / deviation / math.sqrt(2))
    return {"pairs": len(pairs), "green": green, "p_value": p_value}
