"""Prefix caching by hand: the KV of a common prefix is computed once and exported by name; every other run imports its
pages and computes only its own question.

The engine does the same by itself for every `Context`; a program that names its exports decides what stays.

Arguments: `document` and `question`, `name` (of the export), `max_tokens`, `forget` (true: release the export instead).
Returns the text, whether the pages were imported, and how many prompt tokens were computed.

Pie (Gim et al., SOSP 2025), section 7.3; the idea is PagedAttention's (Kwon et al., SOSP 2023).
"""

from weft.sdk import Queue, UnknownHandle, detokenize, greedy, own_model, tokenize

DOCUMENT = "Nora lives in Oslo. She is 34 years old. Nora works as a baker. Max lives in Rome."


async def main(args):
    args = args or {}
    model = await own_model()
    size, max_tokens = model.page_size, args.get("max_tokens", 24)
    prefix = await tokenize(f"<|im_start|>user\nText: {args.get('document', DOCUMENT)}\n\n")
    question = args.get("question", "How old is Nora?")
    rest = await tokenize(f"Question: {question}<|im_end|>\n<|im_start|>assistant\n")
    # Hashes of numbers are the same in every process: another text is never found under this name.
    name = f"{args.get('name', 'document')}/{hash(tuple(prefix)):x}"
    async with Queue() as queue:
        if args.get("forget"):
            return await queue.release_export(name)
        try:
            pages, imported = await queue.import_pages(name), True
        except UnknownHandle:
            pages, imported = queue.alloc_pages(-(-len(prefix) // size)), False
            inputs = queue.alloc_embeds(len(prefix))
            queue.embed_text(prefix, range(len(prefix)), inputs)
            queue.forward(inputs=inputs, write=pages)
            await queue.export_pages(pages, name)
        # The last page may have room; writing to it makes a copy, so the export stays what it is.
        pages = [*pages, *queue.alloc_pages(1 + (len(rest) + max_tokens) // size)]
        place, fed, written = len(prefix), rest, []
        while len(written) < max_tokens:
            positions = range(place, place + len(fed))
            token = await queue.forward_sample(fed, positions, read=pages, write=pages, sampler=greedy())
            if token in model.eos_token_ids:
                break
            place += len(fed)
            fed = [token]
            written.append(token)
    computed = len(rest) + (0 if imported else len(prefix))
    return {"text": await detokenize(written), "tokens": written, "imported": imported, "computed": computed}
