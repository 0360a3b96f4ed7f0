"""Commands on spaces: pages and embeddings that a client names, and queues of what is done with them.

The classes are the only list of these commands: the decoder (`weft.core.wire.codec`) takes every class below
`CommandBase`, and a program's host builds a command from its fields, in their order, behind `space`, `queue` and `op`.
"""

from __future__ import annotations

from typing import ClassVar

from weft.core.sampling import SamplingParams
from weft.core.wire.base import CommandBase


class SpaceCommand(CommandBase, frozen=True):
    """Base of the commands on spaces. The client chooses the number of the space."""

    space: int


class OpenSpace(SpaceCommand, frozen=True, kw_only=True):
    """Create an empty space of pages and embeddings. `reserve_pages` are its own from now on, used or not."""

    op: int
    tenant: str = ""
    namespace: str = ""
    """Exports are found within it, never across."""
    priority: int = 0
    request_id: str = ""
    reserve_pages: int = 0
    tenant_pages: int | None = None
    """Pages that all spaces and exports of the tenant may hold together, as far as this space asks for more; None: no
    such limit."""


class CloseSpace(SpaceCommand, frozen=True):
    """Give everything in the space up. Commands under way end with `Cancelled`; exports stay."""


class ExpectSpace(SpaceCommand, frozen=True, kw_only=True):
    """Say what the program of a space waits for once its commands are done, as `Expect` says it of a sequence. Holds
    until the next command on a queue of the space."""

    kind: str
    expected_in_s: float | None = None


class QueueCommand(SpaceCommand, frozen=True):
    """Base of the commands on a queue; silent unless they fail."""

    queue: int
    op: int


class AnsweredCommand(QueueCommand, frozen=True):
    """Base of those that end in exactly one of `Finished`, `Failed` or `Cancelled`."""

    answer: ClassVar[str] = ""
    """The field of `Finished` that holds the answer; empty: that it is done is all there is to say."""
    returned_by: ClassVar[type[QueueCommand] | None] = None
    """The command that gives back what this one has taken."""


class OpenQueue(QueueCommand, frozen=True):
    """Create a queue of commands."""

    priority: int = 0
    """Added to the space's; lower runs earlier."""


class CloseQueue(QueueCommand, frozen=True):
    """Forget a queue, once what is on it has run."""


class SetQueuePriority(QueueCommand, frozen=True):
    """Change a queue's priority, at once."""

    priority: int


class Sync(AnsweredCommand, frozen=True):
    """Ends with `Finished` when everything put on the queue before is done."""


class FreePages(QueueCommand, frozen=True):
    """Free pages of the space."""

    pages: bytes
    """Packed uint32, as all lists of pages and embeddings."""


class AllocPages(AnsweredCommand, frozen=True):
    """Pages numbered `first` to `first + count - 1`. Ends with `Finished`, or fails with `OutOfPages` after a bounded
    wait."""

    returned_by: ClassVar = FreePages
    first: int
    count: int


class FreeEmbeds(QueueCommand, frozen=True):
    """Free embeddings of the space."""

    embeds: bytes


class AllocEmbeds(AnsweredCommand, frozen=True):
    """Embeddings numbered `first` to `first + count - 1`: room for one vector each. Ends like `AllocPages`."""

    returned_by: ClassVar = FreeEmbeds
    first: int
    count: int


class CopyTokens(QueueCommand, frozen=True):
    """Copy the KV of `count` tokens from one page to free places of another, positions included."""

    source: int
    source_offset: int
    target: int
    target_offset: int
    count: int


class MaskPage(QueueCommand, frozen=True):
    """Hide token s of the page from forwards that read it through this handle where bit s of `hidden` is set; show the
    others."""

    page: int
    hidden: int


class EmbedText(QueueCommand, frozen=True):
    """Write the input embeddings of tokens, which stand at `positions`, into `embeds`."""

    tokens: bytes
    positions: bytes
    """Packed int32."""
    embeds: bytes


class Forward(QueueCommand, frozen=True):
    """Put `inputs` through the model. Each sees the tokens of the pages to `read` and all inputs, as far as their
    positions are not after its own, or as `mask` says. Their KV goes to the first free places of `write`, if any; the
    final hidden states of the last inputs go to `outputs`."""

    read: bytes
    inputs: bytes
    write: bytes = b""
    outputs: bytes = b""
    mask: bytes = b""
    """Packed little-endian bits, [inputs, tokens of `read` in their order + inputs], each row padded to whole bytes."""


class ForwardSample(AnsweredCommand, frozen=True):
    """Put token ids through the model, otherwise as `Forward`, and sample what follows the last one:
    `Finished.tokens`."""

    answer: ClassVar = "tokens"
    read: bytes
    tokens: bytes
    positions: bytes
    write: bytes = b""
    mask: bytes = b""
    sampling: SamplingParams = SamplingParams()
    index: int = 0
    """The number of the token among those drawn with the same seed."""


class NextDist(AnsweredCommand, frozen=True):
    """The `k` most probable tokens after each of `embeds` [n], which hold final hidden states, and the
    log-probabilities of given ones: `Finished.dists`."""

    answer: ClassVar = "dists"
    k: int
    embeds: bytes
    targets: bytes = b""
    """Packed int32 [n, t]."""


class ExportPages(AnsweredCommand, frozen=True):
    """Keep pages, as they are then, under a name, for any space of the namespace to import. They outlive the space;
    when room is short, those not used for longest go."""

    pages: bytes
    name: str


class ImportPages(AnsweredCommand, frozen=True):
    """Pages `first` and on, with the KV exported under a name: `Finished.count`. Shared until a write copies it."""

    answer: ClassVar = "count"
    returned_by: ClassVar = FreePages
    first: int
    name: str


class ReleaseExport(AnsweredCommand, frozen=True):
    """Forget what was exported under a name."""

    name: str
