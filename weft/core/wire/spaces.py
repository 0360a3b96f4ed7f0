"""Commands on spaces: pages and embeddings that a client names, and queues of what is done with them."""

from __future__ import annotations

from weft.core.sampling import SamplingParams
from weft.core.wire.base import CommandBase


class OpenSpace(CommandBase, frozen=True, kw_only=True):
    """Create an empty space of pages and embeddings. `reserve_pages` are its own from now on, used or not."""

    space: int
    op: int
    tenant: str = ""
    namespace: str = ""
    """Exports are found within it, never across."""
    priority: int = 0
    request_id: str = ""
    reserve_pages: int = 0


class CloseSpace(CommandBase, frozen=True, kw_only=True):
    """Give everything in the space up. Commands under way end with `Cancelled`; exports stay."""

    space: int


class _OnQueue(CommandBase, frozen=True, kw_only=True):
    space: int
    queue: int
    op: int


class OpenQueue(_OnQueue, frozen=True, kw_only=True):
    """Create a queue of commands."""

    priority: int = 0
    """Added to the space's; lower runs earlier."""


class CloseQueue(_OnQueue, frozen=True, kw_only=True):
    """Forget a queue, once what is on it has run."""


class SetQueuePriority(_OnQueue, frozen=True, kw_only=True):
    """Change a queue's priority, at once."""

    priority: int


class Sync(_OnQueue, frozen=True, kw_only=True):
    """Ends with `Finished` when everything put on the queue before is done."""


class AllocPages(_OnQueue, frozen=True, kw_only=True):
    """Pages numbered `first` to `first + count - 1`. Ends with `Finished`, or fails with `OutOfPages` after a bounded
    wait."""

    first: int
    count: int


class FreePages(_OnQueue, frozen=True, kw_only=True):
    """Free pages of the space."""

    pages: bytes
    """Packed uint32, as all lists of pages and embeddings."""


class AllocEmbeds(_OnQueue, frozen=True, kw_only=True):
    """Embeddings numbered `first` to `first + count - 1`: room for one vector each. Ends like `AllocPages`."""

    first: int
    count: int


class FreeEmbeds(_OnQueue, frozen=True, kw_only=True):
    """Free embeddings of the space."""

    embeds: bytes


class CopyTokens(_OnQueue, frozen=True, kw_only=True):
    """Copy the KV of `count` tokens from one page to free places of another, positions included."""

    source: int
    source_offset: int
    target: int
    target_offset: int
    count: int


class MaskPage(_OnQueue, frozen=True, kw_only=True):
    """Hide token s of the page from forwards that read it through this handle where bit s of `hidden` is set; show the
    others."""

    page: int
    hidden: int


class EmbedText(_OnQueue, frozen=True, kw_only=True):
    """Write the input embeddings of tokens, which stand at `positions`, into `embeds`."""

    tokens: bytes
    positions: bytes
    """Packed int32."""
    embeds: bytes


class Forward(_OnQueue, frozen=True, kw_only=True):
    """Put `inputs` through the model. Each sees the tokens of the pages to `read` and all inputs, as far as their
    positions are not after its own, or as `mask` says. Their KV goes to the first free places of `write`, if any; the
    final hidden states of the last inputs go to `outputs`."""

    read: bytes
    inputs: bytes
    write: bytes = b""
    outputs: bytes = b""
    mask: bytes = b""
    """Packed little-endian bits, [inputs, tokens of `read` in their order + inputs], each row padded to whole bytes."""


class ForwardSample(_OnQueue, frozen=True, kw_only=True):
    """As `Forward`, from token ids, and sample what follows the last one: `Finished.tokens`."""

    read: bytes
    tokens: bytes
    positions: bytes
    write: bytes = b""
    mask: bytes = b""
    sampling: SamplingParams = SamplingParams()
    index: int = 0
    """The number of the token among those drawn with the same seed."""


class NextDist(_OnQueue, frozen=True, kw_only=True):
    """The `k` most probable tokens after each of `embeds` [n], which hold final hidden states, and the
    log-probabilities of given ones: `Finished.dists`."""

    k: int
    embeds: bytes
    targets: bytes = b""
    """Packed int32 [n, t]."""


class ExportPages(_OnQueue, frozen=True, kw_only=True):
    """Keep pages, as they are then, under a name, for any space of the namespace to import. They outlive the space;
    when room is short, those not used for longest go."""

    pages: bytes
    name: str


class ImportPages(_OnQueue, frozen=True, kw_only=True):
    """Pages `first` and on, with the KV exported under a name: `Finished.count`. Shared until a write copies it."""

    first: int
    name: str


class ReleaseExport(_OnQueue, frozen=True, kw_only=True):
    """Forget what was exported under a name."""

    name: str


QueueCommand = (
    CloseQueue
    | SetQueuePriority
    | Sync
    | AllocPages
    | FreePages
    | AllocEmbeds
    | FreeEmbeds
    | CopyTokens
    | MaskPage
    | EmbedText
    | Forward
    | ForwardSample
    | NextDist
    | ExportPages
    | ImportPages
    | ReleaseExport
)
SpaceCommand = OpenSpace | CloseSpace | OpenQueue | QueueCommand
Answered = Sync | AllocPages | AllocEmbeds | ForwardSample | NextDist | ExportPages | ImportPages | ReleaseExport
"""Commands on queues that end in exactly one of `Finished`, `Failed` or `Cancelled`; others are silent unless they
fail."""
