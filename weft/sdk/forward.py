"""The traits Forward, InputText and OutputText: forward passes over explicit pages and embeddings, and next-token
distributions.

    inputs, output = queue.alloc_embeds(len(tokens)), queue.alloc_embeds(1)
    pages = queue.alloc_pages(1)
    queue.embed_text(tokens, range(len(tokens)), inputs)
    queue.forward(inputs=inputs, write=pages, outputs=output)
    dist = await queue.next_dist(output[0])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from weft.abi.errors import InvalidRequest
from weft.abi.operations import Op
from weft.sdk.answers import Answer, dump, pack_ints, unpack_ints
from weft.sdk.calls import Blobs
from weft.sdk.dist import Dist, unpack_dist
from weft.sdk.pages import Embed, Page, PageQueue, pack
from weft.sdk.sampling import Sampler

DIST_K = 256
"""Default number of tokens in a distribution."""
Mask = Sequence[Sequence[bool]]
"""[inputs, all tokens seen], true where the input sees the token: those of the pages read in order, then the inputs."""


class ForwardQueue(PageQueue):
    """The commands of a queue that run forward passes."""

    _sampler: Sampler | None = None
    _sampling = b"{}"
    """JSON of the last call's sampler, kept because a loop samples with the same one."""

    def embed_text(self, tokens: Iterable[int], positions: Iterable[int], embeds: Iterable[Embed]) -> None:
        """Fill embeddings with those of tokens, each at its position in the text (from 0)."""
        self.check()
        ids, places, slots = pack_ints(tokens), pack_ints(positions), pack(embeds, self.channel)
        if not len(ids) == len(places) == len(slots):
            counts = f"{len(ids) // 4} tokens, {len(places) // 4} positions and {len(slots) // 4} embeddings"
            raise InvalidRequest(f"there must be as many positions and embeddings as tokens, got {counts}", "embeds")
        self.channel.post(Op.EMBED_TEXT, self.number, ids, places, slots, owner=self)

    def forward(
        self,
        read: Iterable[Page] = (),
        inputs: Iterable[Embed] = (),
        write: Iterable[Page] = (),
        outputs: Iterable[Embed] = (),
        mask: Mask | None = None,
    ) -> None:
        """Run one forward pass over the input embeddings.

        The inputs attend to the tokens in the pages of `read` and to each other: as the mask says, or, without one,
        causally by position. Their KV is written to the pages of `write`, from the first free place on; without pages
        it is not kept. The final hidden states of the last `len(outputs)` inputs are written to `outputs`.
        """
        self.check()
        channel = self.channel
        values = (pack(read, channel), pack(inputs, channel), pack(write, channel), pack(outputs, channel))
        if not values[1]:
            raise InvalidRequest("a forward pass needs at least one input embedding", "inputs")
        channel.post(Op.FORWARD, self.number, *values, pack_mask(mask), owner=self)

    def forward_sample(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        *,
        read: Iterable[Page] = (),
        write: Iterable[Page] = (),
        mask: Mask | None = None,
        sampler: Sampler | None = None,
        index: int = 0,
    ) -> Answer[int]:
        """Embed tokens, run a forward pass over them, and sample the token after the last one, in one call.

        `index` counts the draws of a seed: the same seed and index give the same token.
        """
        self.check()
        if not tokens or len(tokens) != len(positions):
            counts = f"{len(tokens)} tokens and {len(positions)} positions"
            raise InvalidRequest(f"there must be a token, and a position for each, got {counts}", "positions")
        channel = self.channel
        if sampler is not self._sampler:
            self._sampler, self._sampling = sampler, dump((sampler or Sampler()).to_json())
        about = b'{"sampling":%b,"index":%d}' % (self._sampling, index)
        pages, places = pack(read, channel), pack(write, channel)
        call = channel.ask(
            Op.FORWARD_SAMPLE,
            *(self.number, pages, pack_ints(tokens), pack_ints(positions), places, pack_mask(mask), about),
            owner=self,
        )
        return Answer(call, _token)

    def next_dist(self, output: Embed, k: int = DIST_K, *, given: Sequence[int] = ()) -> Answer[Dist]:
        """The `k` most probable tokens after an output embedding, and the log-probabilities of the given ones."""
        call = self._next_dist([output], k, given)
        return Answer(call, lambda blobs: unpack_dist(*blobs[:3]))

    def next_dists(
        self, outputs: Sequence[Embed], k: int = DIST_K, *, given: Sequence[Sequence[int]] = ()
    ) -> Answer[list[Dist]]:
        """`next_dist` of several embeddings at once. `given` has the same number of tokens for each embedding."""
        count = len(outputs)
        sizes = {len(tokens) for tokens in given}
        if given and (len(given) != count or len(sizes) != 1):
            raise InvalidRequest(f"given must have as many tokens for each of the {count} embeddings", "given")
        call = self._next_dist(outputs, k, [token for tokens in given for token in tokens])
        return Answer(call, lambda blobs: _dists(blobs, count))

    def _next_dist(self, outputs: Sequence[Embed], k: int, given: Sequence[int]) -> Any:
        self.check()
        if k < 0 or (k == 0 and not given):
            raise InvalidRequest(f"k must be at least 1 (0 with given tokens), got {k}", "k")
        return self.channel.ask(Op.NEXT_DIST, self.number, k, pack(outputs, self.channel), pack_ints(given), owner=self)


def pack_mask(mask: Mask | None) -> bytes:
    """Pack a mask as bits: each row takes whole bytes, with its first column in the lowest bit of the first byte."""
    if mask is None:
        return b""
    width = len(mask[0]) if mask else 0
    rows = []
    for row in mask:
        if len(row) != width:
            raise InvalidRequest(f"the rows of a mask must be equally long, got {width} and {len(row)}", "mask")
        bits = sum(1 << at for at, seen in enumerate(row) if seen)
        rows.append(bits.to_bytes((width + 7) // 8, "little"))
    return b"".join(rows)


def _token(blobs: Blobs) -> int:
    return unpack_ints(blobs[0])[0]


def _dists(blobs: Blobs, count: int) -> list[Dist]:
    parts = [[_cut(blob, at, count) for blob in blobs[:3]] for at in range(count)]
    return [unpack_dist(*part) for part in parts]


def _cut(blob: bytes, at: int, count: int) -> bytes:
    """Row `at` of `count` rows of equal size."""
    size = len(blob) // count
    return blob[at * size : (at + 1) * size]
