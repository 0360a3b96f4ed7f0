"""Modular caching: parts of prompts ("modules") are computed once, each independently at its position, and prompts that
use some of them reuse their KV unchanged.

A module sees only itself and not the text before it, so its KV is the same in every prompt: that is what makes it
reusable, and where the result may differ from that of one plain prompt. Modules stand where the list of all modules
puts them; one that is not used leaves a gap in the positions.

Arguments: `modules` (a list of [name, text], always the same one), `use` (names; all unless given), `question`,
`max_tokens`. Returns the text, which modules were found and which were computed, and the first distribution.

Prompt Cache: Modular Attention Reuse for Low-Latency Inference (Gim et al., MLSys 2024).
"""

from weft.sdk import Queue, UnknownHandle, detokenize, own_model, tokenize

MODULES = [
    ["rules", "<|im_start|>system\nYou answer questions about texts.<|im_end|>\n<|im_start|>user\n"],
    ["nora", "Nora lives in Oslo. She is 34 years old. "],
    ["max", "Max lives in Rome. He works as a baker. "],
]


async def main(args):
    args = args or {}
    modules = args.get("modules", MODULES)
    use = args.get("use", [name for name, _ in modules])
    model = await own_model()
    size, max_tokens = model.page_size, args.get("max_tokens", 24)
    place, pages, found = 0, [], {}
    async with Queue() as queue:
        for name, text in modules:
            tokens = await tokenize(text)
            if name in use:
                found[name], own = await module(queue, f"modules/{name}@{place}", tokens, place, size)
                pages += own
            place += len(tokens)
        question = args.get("question", "How old is Nora?")
        fed = await tokenize(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n")
        pages += (own := queue.alloc_pages(-(-(len(fed) + max_tokens) // size)))
        inputs, output = queue.alloc_embeds(len(fed)), queue.alloc_embeds(1)
        written, first = [], None
        while len(written) < max_tokens:
            queue.embed_text(fed, range(place, place + len(fed)), inputs[: len(fed)])
            queue.forward(pages, inputs[: len(fed)], own, output)
            dist = await queue.next_dist(output[0], 8)
            first = first or dist
            place += len(fed)
            fed = [dist.max_index()]
            if fed[0] in model.eos_token_ids:
                break
            written += fed
    reused = [name for name, was_there in found.items() if was_there]
    computed = [name for name, was_there in found.items() if not was_there]
    text = await detokenize(written)
    return {"text": text, "tokens": written, "reused": reused, "computed": computed, "first": first}


async def module(queue, name, tokens, place, size):
    """Whether it was exported before, and its pages."""
    try:
        return True, await queue.import_pages(name)
    except UnknownHandle:
        pages, inputs = queue.alloc_pages(-(-len(tokens) // size)), queue.alloc_embeds(len(tokens))
        queue.embed_text(tokens, range(place, place + len(tokens)), inputs)
        queue.forward(inputs=inputs, write=pages)
        await queue.export_pages(pages, name)
        return False, pages
