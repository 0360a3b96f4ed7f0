"""Speculative decoding by prompt lookup: the continuation of an earlier occurrence of the last tokens is the draft, and
the model verifies all of it in one forward pass. The result is exactly that of greedy decoding.

A pass appends the draft and one token more that stands for nothing: the likeliest token before each place says how far
the draft is right, and what follows instead. What was wrong is truncated, and the sequence keeps its lineage.

Arguments: `prompt` (what a user says), `match` (tokens that have to agree), `draft` (tokens of a draft), `max_tokens`.
Returns the text, its tokens, the number of forward passes, and how many tokens of drafts were right.

Prompt Lookup Decoding (Saxena, 2023), as in Pie, section 7.3; the check is Leviathan et al., ICML 2023.
"""

from weft.sdk import Sequence, detokenize, own_model, render, tokenize

PROMPT = "Text: Quillon lives in Brimsel.\n\nWhere does Quillon live?"


async def main(args):
    args = args or {}
    match, size, max_tokens = args.get("match", 2), args.get("draft", 6), args.get("max_tokens", 48)
    model = await own_model()
    tokens = await tokenize(await render([{"role": "user", "content": args.get("prompt", PROMPT)}]))
    start, passes, accepted = len(tokens), 0, 0
    async with Sequence() as seq:
        seq.append(tokens[:-1])
        while len(tokens) < start + max_tokens and not set(tokens[start:]) & set(model.eos_token_ids):
            draft = lookup(tokens, match, min(size, start + max_tokens - len(tokens) - 1))
            checked = await seq.score([tokens[-1], *draft, model.eos_token_ids[0]], 1)
            passes += 1
            said = [entry.top.max_index() for entry in checked[1:]]
            right = 0
            while right < len(draft) and draft[right] == said[right]:
                right += 1
            accepted += right
            seq.truncate(len(tokens) + right)
            tokens += said[: right + 1]
    written = tokens[start:]
    ends = [at for at, token in enumerate(written) if token in model.eos_token_ids]
    written = written[: ends[0]] if ends else written
    return {"text": await detokenize(written), "tokens": written, "passes": passes, "accepted": accepted}


def lookup(tokens, match, count):
    """What followed the last tokens when they came before."""
    end = tokens[-match:]
    for at in range(len(tokens) - match - 1, -1, -1):
        if tokens[at : at + match] == end:
            return tokens[at + match : at + match + count]
    return []
