"""The calls under the names of Pie's paper (Gim et al., 2025, Table 1), as thin functions.

Each is one call of the library: `alloc_kvpage(q, n)` is `q.alloc_pages(n)`. Calls on a queue return at once; calls with
an answer return an awaitable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.abi.errors import Unsupported
from weft.sdk import forward as _forward
from weft.sdk import http
from weft.sdk.answers import Answer
from weft.sdk.dist import Dist
from weft.sdk.images import embed_image as embed_img
from weft.sdk.images import forward_with_adapter, num_embs_needed
from weft.sdk.messaging import Child, Subscription, broadcast, launch, subscribe
from weft.sdk.model import Model
from weft.sdk.model import models as available_models
from weft.sdk.pages import Allocation, Embed, Page
from weft.sdk.queues import Queue
from weft.sdk.run import args as get_arg
from weft.sdk.run import log, now, receive, send, sleep
from weft.sdk.sampling import Sampler
from weft.sdk.tokens import detokenize, tokenize
from weft.sdk.tokens import vocabulary as get_vocabs

__all__ = [
    "alloc_emb",
    "alloc_kvpage",
    "available_models",
    "available_traits",
    "broadcast",
    "cancel",
    "copy_kvpage",
    "create_queue",
    "dealloc_emb",
    "dealloc_kvpage",
    "detokenize",
    "embed_img",
    "embed_txt",
    "export_kvpage",
    "forward",
    "forward_with_adapter",
    "forward_with_sampling",
    "get_arg",
    "get_next_dist",
    "get_vocabs",
    "http_get",
    "http_post",
    "import_kvpage",
    "join",
    "launch",
    "log",
    "mask_kvpage",
    "now",
    "num_embs_needed",
    "receive",
    "release_kvpage",
    "send",
    "set_queue_priority",
    "sleep",
    "subscribe",
    "synchronize",
    "tokenize",
    "unsubscribe",
]


def available_traits(model: Model) -> list[str]:
    """The names of a model's traits."""
    return list(model.traits)


async def create_queue(model: Model | None = None, priority: int = 0) -> Queue:
    """Open a queue on the program's own model. Another model raises `Unsupported`."""
    own = (await available_models())[0]
    if model is not None and model.name != own.name:
        raise Unsupported(f"this program runs beside {own.name}; launch a program beside {model.name}", "model")
    return Queue(priority)


def synchronize(q: Queue) -> Answer[None]:
    """Wait until all commands put on the queue so far are done."""
    return q.synchronize()


def set_queue_priority(q: Queue, priority: int) -> None:
    """Set the priority of a queue; lower runs earlier."""
    q.set_priority(priority)


def http_get(url: str, headers: Mapping[str, str] | None = None) -> Answer[http.Response]:
    """Send a GET request; see `weft.sdk.http.get`."""
    return http.get(url, headers=headers)


def http_post(url: str, body: object, headers: Mapping[str, str] | None = None) -> Answer[http.Response]:
    """Send a POST request; see `weft.sdk.http.post`."""
    return http.post(url, body, headers=headers)


def unsubscribe(subscription: Subscription) -> None:
    """End a subscription to a topic."""
    subscription.close()


def join(child: Child) -> Answer[Any]:
    """The value that a child's `main` returned."""
    return child.join()


def cancel(child: Child) -> None:
    """Cancel the run of a child."""
    child.cancel()


def alloc_kvpage(q: Queue, count: int) -> Allocation[Page]:
    """Allocate `count` KV pages, usable at once."""
    return q.alloc_pages(count)


def dealloc_kvpage(q: Queue, pages: Iterable[Page]) -> None:
    """Free pages; using them afterwards raises `UnknownHandle`."""
    q.free_pages(pages)


def alloc_emb(q: Queue, count: int) -> Allocation[Embed]:
    """Allocate `count` embeddings, usable at once."""
    return q.alloc_embeds(count)


def dealloc_emb(q: Queue, embeds: Iterable[Embed]) -> None:
    """Free embeddings; using them afterwards raises `UnknownHandle`."""
    q.free_embeds(embeds)


def copy_kvpage(
    q: Queue, source: Page, dest: Page, source_offset: int = 0, dest_offset: int = 0, *, count: int
) -> None:
    """Copy the KV of `count` tokens from page to page."""
    q.copy_tokens(source, dest, source_offset=source_offset, dest_offset=dest_offset, count=count)


def export_kvpage(q: Queue, pages: Iterable[Page], name: str) -> Answer[None]:
    """Let other programs of the tenant import pages by name."""
    return q.export_pages(pages, name)


def import_kvpage(q: Queue, name: str) -> Answer[list[Page]]:
    """Import the pages exported under a name."""
    return q.import_pages(name)


def release_kvpage(q: Queue, name: str) -> Answer[None]:
    """Remove an export; pages already imported stay."""
    return q.release_export(name)


def embed_txt(q: Queue, tokens: Iterable[int], positions: Iterable[int], embeds: Iterable[Embed]) -> None:
    """Fill embeddings with those of the tokens, each at its position."""
    q.embed_text(tokens, positions, embeds)


def forward(
    q: Queue,
    ikv: Iterable[Page] = (),
    iemb: Iterable[Embed] = (),
    okv: Iterable[Page] = (),
    oemb: Iterable[Embed] = (),
    mask: _forward.Mask | None = None,
) -> None:
    """Run a forward pass: KV in, embeddings in, KV out, embeddings out."""
    q.forward(ikv, iemb, okv, oemb, mask)


def forward_with_sampling(
    q: Queue, tokens: Sequence[int], positions: Sequence[int], *, sampler: Sampler | None = None, **options: Any
) -> Answer[int]:
    """Run a forward pass over tokens and sample the next one. `options` as for `Queue.forward_sample`."""
    return q.forward_sample(tokens, positions, sampler=sampler, **options)


def mask_kvpage(q: Queue, page: Page, hidden: Iterable[bool]) -> None:
    """Hide tokens of a page from forward passes that read it by this handle."""
    q.mask_page(page, hidden)


def get_next_dist(q: Queue, emb: Embed, k: int = _forward.DIST_K, given: Sequence[int] = ()) -> Answer[Dist]:
    """The `k` most probable next tokens after an embedding."""
    return q.next_dist(emb, k, given=given)
