"""Windowed attention: every token sees only the last `window` tokens, so the KV held does not grow with the text.

The prompt is computed under a mask. Afterwards the token that leaves the window is hidden from its page, and a page is
given back once all of it is hidden.

Arguments: `prompt` (what a user says), `window` (tokens, itself included), `max_tokens`.
Returns the text, its tokens with their log-probabilities, and the most pages that were held after the prompt.

Longformer: The Long-Document Transformer (Beltagy et al., 2020), its sliding window.
"""

from weft.sdk import Queue, detokenize, own_model, render, tokenize


async def main(args):
    args = args or {}
    window, max_tokens = args.get("window", 32), args.get("max_tokens", 96)
    model = await own_model()
    size = model.page_size
    message = {"role": "user", "content": args.get("prompt", "Write a story about Ada and a lamp.")}
    tokens = await tokenize(await render([message]))
    start, logprobs, most = len(tokens), [], 0
    async with Queue() as queue:
        pages = dict(enumerate(queue.alloc_pages(-(-start // size))))
        inputs, output = queue.alloc_embeds(start), queue.alloc_embeds(1)
        queue.embed_text(tokens, range(start), inputs)
        mask = [[i - window < j <= i for j in range(start)] for i in range(start)]
        queue.forward(inputs=inputs, write=pages.values(), outputs=output, mask=mask)
        for gone in range(start - window):
            hide(queue, pages, gone, size)
        while len(logprobs) < max_tokens:
            dist = await queue.next_dist(output[0], 1)
            if dist.max_index() in model.eos_token_ids:
                break
            place = len(tokens)
            tokens.append(dist.max_index())
            logprobs.append(dist.logprobs[0])
            if place >= window:
                hide(queue, pages, place - window, size)
            if place % size == 0:
                pages[place // size] = queue.alloc_pages(1)[0]
            most = max(most, len(pages))
            queue.embed_text(tokens[-1:], [place], inputs[:1])
            queue.forward(pages.values(), inputs[:1], [pages[place // size]], output)
    written = tokens[start:]
    return {"text": await detokenize(written), "tokens": written, "logprobs": logprobs, "pages": most}


def hide(queue, pages, place, size):
    """The token at this place, and all before it, are seen no more."""
    if (place + 1) % size:
        queue.mask_page(pages[place // size], [at <= place % size for at in range(size)])
    else:
        queue.free_pages(pages.pop(place // size))
