"""Token healing: a prompt may end inside what would be one token, which forces the model into an unusual tokenization.
The last token is removed, and the next one must begin with its characters.

Arguments: `prompt` (a text that ends anywhere), `max_tokens`.
Returns what follows the prompt with and without healing, and the tokens that were considered instead of the last one.

The Art of Prompt Design: Prompt Boundaries and Token Healing (Lundberg, 2023), as in Guidance.
"""

from weft.sdk import Context, greedy, tokenize, vocabulary

PROMPT = "<|im_start|>user\nWrite a story about Ada and a lamp.<|im_end|>\n<|im_start|>assistant\nAda was a qui"


async def main(args):
    args = args or {}
    prompt, max_tokens = args.get("prompt", PROMPT), args.get("max_tokens", 12)
    tokens = await tokenize(prompt, special=True)
    texts = await vocabulary()
    cut = texts[tokens[-1]]
    wider = [token for token, text in enumerate(texts) if text.startswith(cut)]
    async with Context() as ctx:
        ctx.fill(tokens[:-1])
        healed = ctx.fork()
        plain = await ctx.fill(tokens[-1:]).generate(greedy(), max_tokens=max_tokens)
        first = await healed.generate(greedy().replace(allowed_token_ids=wider), max_tokens=1)
        rest = await healed.generate(greedy(), max_tokens=max_tokens - 1)
        text = (first.text + rest.text).removeprefix(cut.decode("utf-8", "replace"))
        healed.drop()
    return {"healed": text, "plain": plain.text, "considered": len(wider)}
