"""Jacobi decoding: a block of guesses is corrected in parallel, repeatedly; correct guesses are tokens that needed no
pass of their own. The result is exactly that of greedy decoding.

Every pass computes the last token and a block of guesses after it into a scratch page. Where the model's own choice
before a guess agrees with the guess, its KV is what it has to be, and is copied to the text's pages; all other guesses
become what the model would say instead, and are tried again.

Arguments: `prompt` (what a user says), `block` (guesses of a pass), `max_tokens`.
Returns the text, its tokens, and the number of forward passes.

Accelerating Transformer Inference for Translation via Parallel Decoding (Santilli et al., ACL 2023).
"""

from weft.sdk import Queue, detokenize, own_model, render, tokenize


async def main(args):
    args = args or {}
    block, max_tokens = args.get("block", 8), args.get("max_tokens", 48)
    model = await own_model()
    size = model.page_size
    message = {"role": "user", "content": args.get("prompt", "Write a story about Ada and a lamp.")}
    tokens = await tokenize(await render([message]))
    start, passes = len(tokens), 0
    async with Queue() as queue:
        pages = queue.alloc_pages(-(-(start + max_tokens + block) // size))
        inputs, outputs = queue.alloc_embeds(max(start, block + 1)), queue.alloc_embeds(block + 1)
        queue.embed_text(tokens[:-1], range(start - 1), inputs[: start - 1])
        queue.forward(inputs=inputs[: start - 1], write=pages)
        guesses = tokens[-1:] * block
        while len(tokens) < start + max_tokens and not any(token in model.eos_token_ids for token in tokens[start:]):
            place = len(tokens) - 1
            tried = [tokens[-1], *guesses]
            scratch = queue.alloc_pages(-(-len(tried) // size))
            queue.embed_text(tried, range(place, place + len(tried)), inputs[: len(tried)])
            queue.forward(pages, inputs[: len(tried)], scratch, outputs)
            said = [dist.max_index() for dist in await queue.next_dists(outputs, 1)]
            passes += 1
            right = 0
            while right < block and guesses[right] == said[right]:
                right += 1
            for at in range(right + 1):
                source, dest = divmod(at, size), divmod(place + at, size)
                queue.copy_tokens(
                    scratch[source[0]], pages[dest[0]], source_offset=source[1], dest_offset=dest[1], count=1
                )
            queue.free_pages(scratch)
            tokens += said[: right + 1]
            guesses = (said[right + 1 :] + said[-1:] * block)[:block]
    written = tokens[start:][:max_tokens]
    ends = [at for at, token in enumerate(written) if token in model.eos_token_ids]
    written = written[: ends[0]] if ends else written
    return {"text": await detokenize(written), "tokens": written, "passes": passes}
