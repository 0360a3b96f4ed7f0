"""Explicit pages, embeddings and forward passes against a host that answers packed commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sdk import fake_model as model
from tests.sdk.fake_host import FakeHost
from weft.abi.operations import Op
from weft.sdk import (
    InvalidRequest,
    Queue,
    Sampler,
    Sequence,
    UnknownHandle,
    Unsupported,
    api,
    errors,
    own_model,
)
from weft.sdk.images import load_adapter


def test_the_papers_loop_over_pages_equals_the_sequence() -> None:
    """Greedy generation as in §4.2: prefill, then one embedding, one forward and one distribution per token."""
    host = FakeHost()

    async def by_pages(prompt: list[int], count: int) -> list[int]:
        q = await api.create_queue()
        prompt_emb, out = api.alloc_emb(q, len(prompt)), api.alloc_emb(q, 1)
        kv = api.alloc_kvpage(q, 2)
        api.embed_txt(q, prompt, range(len(prompt)), prompt_emb)
        api.forward(q, [], prompt_emb, kv, out)
        tokens: list[int] = []
        for position in range(len(prompt), len(prompt) + count):
            dist = await api.get_next_dist(q, out[0])
            tokens.append(dist.max_index())
            api.embed_txt(q, tokens[-1:], [position], out)
            api.forward(q, kv, out, kv, out)
        await api.synchronize(q)
        api.dealloc_emb(q, [*prompt_emb, *out])
        api.dealloc_kvpage(q, kv)
        q.release()
        return tokens

    async def by_sequence(prompt: list[int], count: int) -> list[int]:
        async with Sequence() as seq:
            seq.append(prompt)
            tokens: list[int] = []
            for _ in range(count):
                tokens.append((await seq.next_dist(5, append=tokens[-1:])).max_index())
            return tokens

    async def main() -> None:
        prompt = await api.tokenize("Hello, ")
        assert await by_pages(prompt, 5) == await by_sequence(prompt, 5)

    host.run(main)
    assert host.num_pages == 0
    assert host.sequences == {}


def test_masks_copies_exports_and_sampling() -> None:
    host = FakeHost()

    async def main() -> None:
        async with Queue(priority=3) as q:
            pages = await q.alloc_pages(3)
            tokens, places = [10, 11, 12, 13], [0, 1, 2, 3]
            token = await q.forward_sample(tokens, places, write=pages[:1], sampler=Sampler(seed=1), index=2)
            assert token == model.top(tokens, 1)[0][0]
            # What a mask hides, what a page hides, and what is not read, are all the same to the model.
            without = model.top([10, 12, 13, 14], 1)[0][0]
            row = [True, False, True, True, True]
            assert await q.forward_sample([14], [4], read=pages[:1], mask=[row]) == without
            q.mask_page(pages[0], [False, True])
            assert await q.forward_sample([14], [4], read=pages[:1]) == without
            q.copy_tokens(pages[0], pages[1], source_offset=2, count=2)
            assert await q.forward_sample([14], [4], read=[pages[1]]) == model.top([12, 13, 14], 1)[0][0]
            await q.export_pages(pages[:2], "shared")
            found = await q.import_pages("shared")
            assert len(found) == 2
            assert await q.forward_sample([14], [4], read=[found[1]]) == model.top([12, 13, 14], 1)[0][0]
            await q.release_export("shared")
            with pytest.raises(UnknownHandle):
                await q.import_pages("shared")
            q.set_priority(1)
            inputs, outputs = q.alloc_embeds(2), q.alloc_embeds(2)
            q.embed_text([1, 2], [0, 1], inputs)
            q.forward(inputs=inputs, outputs=outputs)
            dists = await q.next_dists(outputs, 3, given=[[7], [8]])
            expected = [
                (model.top(seen, 3), model.distribution(seen)[given]) for seen, given in (([1], 7), ([1, 2], 8))
            ]
            for dist, (best, given) in zip(dists, expected, strict=True):
                assert dist.ids == tuple(token for token, _ in best)
                assert dist.given == (pytest.approx(given),)

    host.run(main)


def test_a_freed_handle_is_refused_at_once() -> None:
    host = FakeHost()

    async def main() -> None:
        q = Queue()
        pages, embeds = q.alloc_pages(2), q.alloc_embeds(1)
        q.free_pages(pages[0])
        for use in (
            lambda: q.free_pages(pages),
            lambda: q.mask_page(pages[0], [True]),
            lambda: q.copy_tokens(pages[0], pages[1], count=1),
            lambda: q.forward(read=pages, inputs=embeds),
            lambda: q.export_pages(pages, "x"),
            lambda: q.free_pages([pages[1], pages[1]]),
        ):
            with pytest.raises(UnknownHandle):
                use()
        assert pages[1].is_open
        q.release()
        with pytest.raises(UnknownHandle, match="queue"):
            q.synchronize()
        seq = Sequence()
        seq.release()
        for action in (lambda: seq.append([1]), seq.generate, seq.fork, lambda: seq.truncate(0)):
            with pytest.raises(UnknownHandle, match="sequence"):
                action()

    host.run(main)


def test_what_fails_on_a_queue_is_raised_once_by_what_comes_next() -> None:
    host = FakeHost()
    host.fail(Op.PAGES_ALLOC, "out_of_pages")
    host.fail(Op.PAGES_ALLOC, "out_of_pages")

    async def main() -> None:
        q = Queue()
        with pytest.raises(errors.OutOfPages):
            await q.alloc_pages(1)
        pages = q.alloc_pages(1)
        with pytest.raises(errors.OutOfPages):
            await q.synchronize()
        q.free_pages(pages)
        with pytest.raises(UnknownHandle):
            await q.synchronize()
        await q.synchronize()

    host.run(main)


@pytest.mark.parametrize(
    "use",
    [
        lambda q: q.alloc_pages(0),
        lambda q: q.forward(),
        lambda q: q.forward_sample([], []),
        lambda q: q.forward_sample([1], [1, 2]),
        lambda q: q.embed_text([1], [0], []),
        lambda q: q.embed_text([1 << 40], [0], q.alloc_embeds(1)),
        lambda q: q.next_dist(q.alloc_embeds(1)[0], 0),
        lambda q: q.next_dists(q.alloc_embeds(2), given=[[1], []]),
        lambda q: q.forward(inputs=q.alloc_embeds(1), mask=[[True], [True, False]]),
        lambda q: q.mask_page(q.alloc_pages(1)[0], [True] * 33),
    ],
)
def test_values_that_cannot_be(use: Callable[[Queue], object]) -> None:
    async def main() -> None:
        with pytest.raises(InvalidRequest):
            use(Queue())

    FakeHost().run(main)


def test_images_and_adapters_are_refused_by_name() -> None:
    async def main() -> None:
        own, q = await own_model(), Queue()
        for use, trait in (
            (lambda: api.num_embs_needed(own, (64, 64)), "InputImage"),
            (lambda: api.embed_img(q, b"", []), "InputImage"),
            (lambda: api.forward_with_adapter(q, None), "Adapter"),
            (lambda: load_adapter(q, "mine"), "Adapter"),
        ):
            with pytest.raises(Unsupported) as raised:
                use()
            assert raised.value.param == trait

    FakeHost().run(main)
