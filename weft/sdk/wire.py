"""What a program says to its host and hears back: packed bytes, the same for Python, C and Rust, trusted or not.

A program sends **commands** and receives **events**. It chooses the numbers of its calls, sequences, queues, pages and
embeddings itself, so nothing has to be waited for; they mean something in this program alone. A call that answers ends
with exactly one `RESULT` or `ERROR` event of its number, after any number of `PART` events; a call that does not answer
is heard of again only when it fails, as an `ERROR`.

Everything is little-endian. A message is any number of frames, one after the other:

    command   u32 size of what follows | u8 operation | u32 call | numbers | u32 length of each blob | blobs
    event     u32 size of what follows | u8 kind      | u32 call | u8 blobs | u32 length of each blob | blobs

Which numbers and how many blobs an operation has is in `LAYOUT`. Token ids are int32, handles uint32, log-probabilities
float32, texts UTF-8. Where a blob is JSON, its fields are described at the operation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

VERSION = 1
MAX_FRAME_BYTES = 16 << 20
"""Of one command; a larger one ends its program."""


class Op(IntEnum):
    """Operations, by trait. `-> ...` are the blobs of the result; without it the call does not answer."""

    # Core
    LOG = 1
    """level (0 debug, 1 info, 2 warning, 3 error); text"""
    SEND = 2
    """JSON: a message for whoever launched the program, or is attached to it"""
    RECEIVE = 3
    """-> JSON: the next message from there"""
    SLEEP = 4
    """seconds ->"""
    MODELS = 5
    """-> JSON [{name, traits, vocab_size, page_size, max_context, eos_token_ids, hidden_size, dtype, device,
    chat_template, tool_call_parser, reasoning}], the program's own model first. `chat_template`: whether it has one;
    `tool_call_parser`: the form in which the model writes calls of tools (a key of `weft.sdk.tool_calls.PARSERS`) or
    null; `reasoning`: whether it thinks between tags"""
    CANCEL = 6
    """call: give up waiting for it. It ends with an ERROR of kind `cancelled`, unless it has ended before"""
    HTTP = 7
    """JSON {method, url, headers, timeout_s, max_bytes}; body -> JSON {status, headers, url}; body"""

    # Messaging
    BROADCAST = 10
    """topic; JSON"""
    SUBSCRIBE = 11
    """topic -> PART (topic; JSON) for each message, until it is cancelled"""
    LAUNCH = 12
    """child; JSON {program, source, args, limits} -> JSON {run}: it has started. One of program and source"""
    JOIN = 13
    """child -> JSON: what its main returned; an ERROR if it failed"""
    KILL = 14
    """child: cancel it"""

    # Tokenize
    TOKENIZE = 20
    """1: with special tokens around; text -> token ids"""
    DETOKENIZE = 21
    """1: leave special tokens out; token ids -> text"""
    VOCABULARY = 22
    """-> u32 length of each token's bytes; all bytes"""
    RENDER = 23
    """1: add the generation prompt; JSON messages; JSON {tools, documents, chat_template, template_kwargs} -> text"""

    # Sequence
    SEQ_OPEN = 30
    """sequence, priority"""
    SEQ_APPEND = 31
    """sequence; token ids"""
    SEQ_GENERATE = 32
    """sequence, text (0: none, 1: without special tokens, 2: with them; and 4 more: all in one PART, at the end); JSON
    {sampling, stop, grammar} -> PART (token ids [n]; text; with `sampling.logprobs` = k also log-probabilities [n]; ids
    [n, k]; log-probabilities [n, k]) ...; JSON {reason, stop, usage}.

    `sampling` and `stop` have the fields of `weft.core.sampling`, those left out at their defaults, stop strings as
    texts; `grammar` is {kind, text} or missing; `usage` has the fields of `weft.core.wire.Usage`. All texts together
    are what was generated without what ended it, be that a stop string, a stop token or the end of sequence; the tokens
    are all that were sampled."""
    SEQ_DIST = 33
    """sequence, k; token ids to append (may be none) -> token ids [k]; log-probabilities [k]: what is likely next"""
    SEQ_SCORE = 34
    """sequence, k; token ids to append -> log-probabilities [n] (NaN for a first token); ids [n, k] (-1: none);
    log-probabilities [n, k]"""
    SEQ_FORK = 35
    """sequence, child"""
    SEQ_TRUNCATE = 36
    """sequence, tokens to keep"""
    SEQ_HOLD = 37
    """sequence, seconds"""
    SEQ_RELEASE = 38
    """sequence"""
    SEQ_CANCEL = 39
    """sequence"""
    SEQ_PRIORITY = 40
    """sequence, priority"""
    SEQ_MASK = 45
    """sequence; int32 pairs (first token, past the last): hidden from all tokens that follow, instead of those hidden
    before"""

    # Store: small values of the program's tenant, by name; they outlive programs and servers
    STORE_PUT = 41
    """name; value ->"""
    STORE_GET = 42
    """name -> u8 1 if there is one; value"""
    STORE_DELETE = 43
    """name ->"""
    STORE_LIST = 44
    """prefix -> JSON [name]"""

    # Allocate
    QUEUE_OPEN = 50
    """queue, priority"""
    QUEUE_CLOSE = 51
    """queue"""
    QUEUE_PRIORITY = 52
    """queue, priority"""
    QUEUE_SYNC = 53
    """queue -> (when all before it is done)"""
    PAGES_ALLOC = 54
    """queue, first, count: pages first to first + count - 1 ->"""
    PAGES_FREE = 55
    """queue; pages"""
    EMBEDS_ALLOC = 56
    """queue, first, count ->"""
    EMBEDS_FREE = 57
    """queue; embeddings"""
    TOKENS_COPY = 58
    """queue, source page, offset, destination page, offset, count"""
    PAGES_EXPORT = 59
    """queue; pages; name ->"""
    PAGES_IMPORT = 60
    """queue, first; name -> u32 count: pages first to first + count - 1"""
    PAGES_RELEASE = 61
    """queue; name: forget an export ->"""

    # Forward, InputText, OutputText
    PAGE_MASK = 62
    """queue, page, bits: token s of the page is hidden where bit s is set"""
    EMBED_TEXT = 63
    """queue; token ids [n]; positions int32 [n]; embeddings [n]"""
    FORWARD = 64
    """queue; pages to read; input embeddings [n]; pages to write (none: KV is not kept); output embeddings (m <= n, of
    the last m inputs); mask: packed bits [n, all tokens seen], each row padded to whole bytes, or nothing. Bit i of a
    row is in byte i // 8 with the value 1 << i % 8; set: the input sees the token. All tokens seen: those of the pages
    to read in their order, then the inputs"""
    FORWARD_SAMPLE = 65
    """queue; pages to read; token ids [n]; positions int32 [n]; pages to write; mask; JSON {sampling, index} -> token
    ids [1]: the one sampled after the last input"""
    NEXT_DIST = 66
    """queue, k; embeddings [n]; token ids [n * t] -> ids [n, k]; log-probabilities [n, k]; log-probabilities [n, t] of
    the given tokens"""

    # Grammars, followed by the program itself
    MATCHER_OPEN = 70
    """matcher; JSON grammar {kind, text} ->"""
    MATCHER_PUSH = 71
    """matcher; token ids -> u8 1 if nothing may follow; packed bits [vocabulary]: what may follow, token t in byte
    t // 8 with the value 1 << t % 8"""
    MATCHER_CLOSE = 72
    """matcher"""


class Kind(IntEnum):
    """Kinds of events."""

    RESULT = 0
    """The call ended well."""
    ERROR = 1
    """The call failed: kind (one of `weft.core.errors`); message; what is to blame, or nothing."""
    PART = 2
    """A piece of what the call answers."""


class Layout(NamedTuple):
    """What a command carries."""

    numbers: str
    """Of `struct`: I uint32, i int32, B uint8, d float64."""
    blobs: int


LAYOUT: dict[Op, Layout] = {
    Op.LOG: Layout("B", 1),
    Op.SEND: Layout("", 1),
    Op.RECEIVE: Layout("", 0),
    Op.SLEEP: Layout("d", 0),
    Op.MODELS: Layout("", 0),
    Op.CANCEL: Layout("I", 0),
    Op.HTTP: Layout("", 2),
    Op.BROADCAST: Layout("", 2),
    Op.SUBSCRIBE: Layout("", 1),
    Op.LAUNCH: Layout("I", 1),
    Op.JOIN: Layout("I", 0),
    Op.KILL: Layout("I", 0),
    Op.TOKENIZE: Layout("B", 1),
    Op.DETOKENIZE: Layout("B", 1),
    Op.VOCABULARY: Layout("", 0),
    Op.RENDER: Layout("B", 2),
    Op.SEQ_OPEN: Layout("Ii", 0),
    Op.SEQ_APPEND: Layout("I", 1),
    Op.SEQ_GENERATE: Layout("IB", 1),
    Op.SEQ_DIST: Layout("II", 1),
    Op.SEQ_SCORE: Layout("II", 1),
    Op.SEQ_FORK: Layout("II", 0),
    Op.SEQ_TRUNCATE: Layout("II", 0),
    Op.SEQ_HOLD: Layout("Id", 0),
    Op.SEQ_RELEASE: Layout("I", 0),
    Op.SEQ_CANCEL: Layout("I", 0),
    Op.SEQ_PRIORITY: Layout("Ii", 0),
    Op.SEQ_MASK: Layout("I", 1),
    Op.STORE_PUT: Layout("", 2),
    Op.STORE_GET: Layout("", 1),
    Op.STORE_DELETE: Layout("", 1),
    Op.STORE_LIST: Layout("", 1),
    Op.QUEUE_OPEN: Layout("Ii", 0),
    Op.QUEUE_CLOSE: Layout("I", 0),
    Op.QUEUE_PRIORITY: Layout("Ii", 0),
    Op.QUEUE_SYNC: Layout("I", 0),
    Op.PAGES_ALLOC: Layout("III", 0),
    Op.PAGES_FREE: Layout("I", 1),
    Op.EMBEDS_ALLOC: Layout("III", 0),
    Op.EMBEDS_FREE: Layout("I", 1),
    Op.TOKENS_COPY: Layout("IIIIII", 0),
    Op.PAGES_EXPORT: Layout("I", 2),
    Op.PAGES_IMPORT: Layout("II", 1),
    Op.PAGES_RELEASE: Layout("I", 1),
    Op.PAGE_MASK: Layout("III", 0),
    Op.EMBED_TEXT: Layout("I", 3),
    Op.FORWARD: Layout("I", 5),
    Op.FORWARD_SAMPLE: Layout("I", 6),
    Op.NEXT_DIST: Layout("II", 2),
    Op.MATCHER_OPEN: Layout("I", 1),
    Op.MATCHER_PUSH: Layout("I", 1),
    Op.MATCHER_CLOSE: Layout("I", 0),
}


class _Frame(NamedTuple):
    """How a command is packed."""

    op: Op
    head: struct.Struct
    """Size, operation, call, numbers, and the length of each blob."""
    num_numbers: int


_FRAMES = {
    op: _Frame(op, struct.Struct(f"<IBI{layout.numbers}{layout.blobs}I"), len(layout.numbers))
    for op, layout in LAYOUT.items()
}
"""Found by the number of an operation too, which equals it."""
_SIZE = struct.Struct("<I")
_EVENT = struct.Struct("<IBIB")
_LENGTHS = [struct.Struct(f"<{count}I") for count in range(256)]
"""Of an event's blobs, by how many there are."""
_KINDS = tuple(Kind)


class WireError(ValueError):
    """Bytes that are no message. Whoever sent them is at fault."""


class Command(NamedTuple):
    """One command, as its host reads it."""

    op: Op
    call: int
    numbers: tuple[int | float, ...]
    blobs: list[bytes]


class Event(NamedTuple):
    """One event, as a program reads it."""

    kind: Kind
    call: int
    blobs: list[bytes]


def pack(op: Op, call: int, *values: float | bytes) -> bytes:
    """One command: its numbers, then its blobs, in the order of `LAYOUT`. Raises `struct.error` for a number that does
    not fit."""
    _, head, num_numbers = _FRAMES[op]
    size = head.size - _SIZE.size
    if len(values) == num_numbers:
        return head.pack(size, op, call, *values)
    blobs: tuple[bytes, ...] = values[num_numbers:]  # type: ignore[assignment]
    size += sum(map(len, blobs))
    return b"".join((head.pack(size, op, call, *values[:num_numbers], *map(len, blobs)), *blobs))


def commands(data: bytes) -> Iterator[Command]:
    """The commands of a message. Raises `WireError` at the first frame that is none."""
    start, end = 0, len(data)
    while start < end:
        if end - start < 9:
            raise WireError(f"{end - start} bytes are no command")
        size = _SIZE.unpack_from(data, start)[0]
        frame = _FRAMES.get(data[start + 4])  # type: ignore[call-overload]
        if frame is None:
            raise WireError(f"there is no operation {data[start + 4]}")
        op, head, num_numbers = frame
        stop = start + _SIZE.size + size
        body = start + head.size
        if stop > end or body > stop or size > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {op.name} has a wrong size, {size} bytes")
        fields = head.unpack_from(data, start)
        split = 3 + num_numbers
        yield Command(op, fields[2], fields[3:split], _blobs(data, body, stop, fields[split:]))
        start = stop


def pack_event(kind: Kind, call: int, *blobs: bytes) -> bytes:
    """One event."""
    lengths = _LENGTHS[len(blobs)]
    size = _EVENT.size - _SIZE.size + lengths.size + sum(map(len, blobs))
    return b"".join((_EVENT.pack(size, kind, call, len(blobs)), lengths.pack(*map(len, blobs)), *blobs))


def events(data: bytes) -> Iterator[Event]:
    """The events of a message. Raises `WireError` at the first frame that is none."""
    start, end = 0, len(data)
    while start < end:
        if end - start < _EVENT.size:
            raise WireError(f"{end - start} bytes are no event")
        size, kind, call, count = _EVENT.unpack_from(data, start)
        lengths = _LENGTHS[count]
        stop = start + _SIZE.size + size
        body = start + _EVENT.size + lengths.size
        if stop > end or body > stop or kind >= len(_KINDS):
            raise WireError(f"a frame of an event has a wrong size, {size} bytes")
        yield Event(_KINDS[kind], call, _blobs(data, body, stop, lengths.unpack_from(data, start + _EVENT.size)))
        start = stop


def _blobs(data: bytes, start: int, stop: int, lengths: tuple[int, ...]) -> list[bytes]:
    blobs = []
    for length in lengths:
        blobs.append(data[start : start + length])
        start += length
    if start != stop:
        raise WireError("the lengths of a frame's blobs do not add up to its size")
    return blobs
