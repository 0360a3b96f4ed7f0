"""EBNF decoding: the program enforces a context-free grammar itself, taking the most probable token that the grammar
allows. `ctx.generate(grammar=ebnf(...))` does the same inside the engine, without a round trip per token.

Arguments: `prompt` (what a user says), `grammar` (rules in the notation of GBNF, from `root`), `max_tokens`.
Returns the text, its tokens, whether the text is complete, and how many tokens were chosen by the grammar alone.

Grammar-constrained decoding as in Pie (section 7.3) and XGrammar (Dong et al., MLSys 2025).
"""

from weft.sdk import Matcher, Sequence, detokenize, ebnf, own_model, render, tokenize

GRAMMAR = r"""
root   ::= "{\"name\": " string ", \"city\": " string ", \"age\": " number "}"
string ::= "\"" [A-Za-z ]+ "\""
number ::= [1-9] [0-9]?     # no zero in front
"""


async def main(args):
    args = args or {}
    prompt = args.get("prompt", "Extract name, city, age as JSON: Nora lives in Oslo. She is 34 years old.")
    model = await own_model()
    fed = await tokenize(await render([{"role": "user", "content": prompt}]))
    written, forced, is_complete = [], 0, False
    async with Matcher(ebnf(args.get("grammar", GRAMMAR))) as matcher, Sequence() as seq:
        allowed = await matcher.push()
        while not allowed.done and len(written) < args.get("max_tokens", 64):
            if len(allowed) == 1:
                # Only one token may follow: the model need not be asked, only told.
                token = next(iter(allowed))
                forced += 1
            else:
                dist = (await seq.next_dist(append=fed)).keep(allowed)
                if not len(dist):
                    # None of the likely ones is allowed: look at all.
                    dist = (await seq.next_dist(model.vocab_size)).keep(allowed)
                token, fed = dist.max_index(), []
            if token in model.eos_token_ids:
                is_complete = True
                break
            fed = [*fed, token]
            written.append(token)
            allowed = await matcher.push([token])
    text = await detokenize(written)
    return {"text": text, "tokens": written, "complete": is_complete or allowed.done, "forced": forced}
