"""Attention sink: every token sees the first `sinks` tokens and the last `window` tokens, so a text of any length needs
a bounded number of KV pages.

The first tokens stay because attention puts what it does not need on them. Tokens keep their positions in the whole
text, so it ends with the model's last position (the paper counts positions within the cache, and need not end).

Arguments: `prompt` (what a user says), `sinks` and `window` (tokens), `max_tokens`.
Returns the text, its tokens with their log-probabilities, and the most pages that were held after the prompt.

Efficient Streaming Language Models with Attention Sinks (Xiao et al., ICLR 2024).
"""

from weft.sdk import Queue, detokenize, own_model, render, tokenize


async def main(args):
    args = args or {}
    sinks, window, max_tokens = args.get("sinks", 4), args.get("window", 32), args.get("max_tokens", 96)
    model = await own_model()
    size = model.page_size
    message = {"role": "user", "content": args.get("prompt", "Write a story about Ada and a lamp.")}
    tokens = await tokenize(await render([message]))
    start, logprobs, most = len(tokens), [], 0
    async with Queue() as queue:
        pages = dict(enumerate(queue.alloc_pages(-(-start // size))))
        inputs, output = queue.alloc_embeds(start), queue.alloc_embeds(1)
        queue.embed_text(tokens, range(start), inputs)
        mask = [[j <= i and (j < sinks or j > i - window) for j in range(start)] for i in range(start)]
        queue.forward(inputs=inputs, write=pages.values(), outputs=output, mask=mask)
        for gone in range(sinks, start - window):
            hide(queue, pages, gone, size, sinks)
        while len(logprobs) < max_tokens:
            dist = await queue.next_dist(output[0], 1)
            if dist.max_index() in model.eos_token_ids:
                break
            place = len(tokens)
            tokens.append(dist.max_index())
            logprobs.append(dist.logprobs[0])
            if place - window >= sinks:
                hide(queue, pages, place - window, size, sinks)
            if place % size == 0:
                pages[place // size] = queue.alloc_pages(1)[0]
            most = max(most, len(pages))
            queue.embed_text(tokens[-1:], [place], inputs[:1])
            queue.forward(pages.values(), inputs[:1], [pages[place // size]], output)
    written = tokens[start:]
    return {"text": await detokenize(written), "tokens": written, "logprobs": logprobs, "pages": most}


def hide(queue, pages, place, size, sinks):
    """The token at this place, and all between it and the sinks, are seen no more."""
    number = place // size
    hidden = [sinks <= at <= place for at in range(number * size, (number + 1) * size)]
    if all(hidden):
        queue.free_pages(pages.pop(number))
    else:
        queue.mask_page(pages[number], hidden)
