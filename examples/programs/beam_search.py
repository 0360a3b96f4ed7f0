"""Beam search: the most probable continuations as a whole, not token by token. Beams are forks of one sequence, so they
share the KV of their common prefix, and all are computed in the same batch.

The search itself is `weft.sdk.beam`: `Sequence.fork` and `Sequence.next_dist`, and the algorithm in
`weft.sdk.beam_rules`.

Arguments: `prompt` (what a user says), `width` (beams), `max_tokens`, `length_penalty`.
Returns the beams: text, tokens, score and log-probability, best first.

Beam Search Strategies for Neural Machine Translation (Freitag and Al-Onaizan, 2017); rules as in transformers.
"""

from weft.sdk import Context, beam_search


async def main(args):
    args = args or {}
    async with Context() as ctx:
        ctx.user(args.get("prompt", "Who are you?"))
        return await beam_search(
            ctx,
            args.get("width", 4),
            args.get("max_tokens", 16),
            length_penalty=args.get("length_penalty", 1.0),
        )
