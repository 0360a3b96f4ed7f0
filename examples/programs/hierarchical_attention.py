"""Hierarchical attention: a document is a tree, and every part of it sees only itself and the headings above it.

Each part has KV pages of its own, and reads those of the parts above it: the tree of parts is a tree of pages, and no
mask is needed. What is generated goes on from the last part. A text of n parts costs n short forward passes, which the
engine batches, instead of one whose cost grows with the square of the length.

Arguments: `parts` (a list of [depth, text], depth 0 at the root, each below the last part of less depth before it),
`max_tokens`. Returns the text, its tokens with their log-probabilities, and how many parts the last one sees.

AST-Trans: Code Summarization with Efficient Tree-Structured Attention (Tang et al., ICSE 2022).
"""

from weft.sdk import Queue, detokenize, own_model, tokenize

PARTS = [
    [0, "<|im_start|>user\nRead this and answer the question."],
    [1, "\nNora lives in Oslo. She works as a baker."],
    [1, "\nMax lives in Rome. He is 34 years old."],
    [2, "\nHow old is Max?<|im_end|>\n<|im_start|>assistant\n"],
]


async def main(args):
    args = args or {}
    model = await own_model()
    size, max_tokens = model.page_size, args.get("max_tokens", 32)
    parts = [[depth, await tokenize(text)] for depth, text in args.get("parts", PARTS)]
    place, above = 0, []
    async with Queue() as queue:
        output = queue.alloc_embeds(1)
        for depth, tokens in parts:
            above = above[:depth]
            own = queue.alloc_pages(-(-len(tokens) // size))
            inputs = queue.alloc_embeds(len(tokens))
            queue.embed_text(tokens, range(place, place + len(tokens)), inputs)
            queue.forward([page for pages in above for page in pages], inputs, own, output)
            queue.free_embeds(inputs)
            above.append(own)
            place += len(tokens)
        above[-1] = [*above[-1], *queue.alloc_pages(-(-max_tokens // size))]
        seen = [page for pages in above for page in pages]
        written, logprobs, slot = [], [], queue.alloc_embeds(1)
        while len(written) < max_tokens:
            dist = await queue.next_dist(output[0], 1)
            if dist.max_index() in model.eos_token_ids:
                break
            written.append(dist.max_index())
            logprobs.append(dist.logprobs[0])
            queue.embed_text(written[-1:], [place], slot)
            queue.forward(seen, slot, above[-1], output)
            place += 1
    return {"text": await detokenize(written), "tokens": written, "logprobs": logprobs, "sees": len(above)}
