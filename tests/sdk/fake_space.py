"""Explicit pages and embeddings of the fake host: a page is a list of tokens with positions, an output embedding is
what its input has seen. The model is a function of the tokens seen, in order of their positions."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

from tests.sdk import fake_model as model
from weft.abi.frames import CommandFrame
from weft.abi.operations import Op
from weft.sdk.answers import pack_ints, unpack_ints

Slot = tuple[int, int]
"""Position and token."""


@dataclass
class _Page:
    slots: list[Slot] = field(default_factory=list)
    hidden: int = 0


class Pages:
    """Of one program."""

    def __init__(self) -> None:
        self.pages: dict[int, _Page] = {}
        self.embeds: dict[int, list[Slot]] = {}
        self.exports: dict[str, list[list[Slot]]] = {}
        self.queues: dict[int, int] = {}

    def carry_out(self, command: CommandFrame, fault: Any) -> tuple[bytes, ...] | None:
        """The blobs of the result, or None."""
        numbers = [int(number) for number in command.numbers]
        blobs = command.blobs
        if command.op is Op.QUEUE_OPEN:
            self.queues[numbers[0]] = numbers[1]
            return None
        if numbers[0] not in self.queues:
            raise fault("unknown_handle", f"there is no queue {numbers[0]}")
        try:
            result = getattr(self, command.op.name.lower())(*numbers, *blobs)
        except KeyError as error:
            raise fault("unknown_handle", f"there is no page or embedding {error}") from None
        assert result is None or isinstance(result, tuple)
        return result

    def queue_close(self, queue: int) -> None:
        del self.queues[queue]

    def queue_priority(self, queue: int, priority: int) -> None:
        self.queues[queue] = priority

    def queue_sync(self, queue: int) -> tuple[bytes, ...]:
        return ()

    def pages_alloc(self, queue: int, first: int, count: int) -> tuple[bytes, ...]:
        self.pages |= {first + at: _Page() for at in range(count)}
        return ()

    def pages_free(self, queue: int, pages: bytes) -> None:
        for page in _handles(pages):
            del self.pages[page]

    def embeds_alloc(self, queue: int, first: int, count: int) -> tuple[bytes, ...]:
        self.embeds |= {first + at: [] for at in range(count)}
        return ()

    def embeds_free(self, queue: int, embeds: bytes) -> None:
        for embed in _handles(embeds):
            del self.embeds[embed]

    def tokens_copy(self, queue: int, source: int, offset: int, dest: int, at: int, count: int) -> None:
        self.pages[dest].slots[at : at + count] = self.pages[source].slots[offset : offset + count]

    def pages_export(self, queue: int, pages: bytes, name: bytes) -> tuple[bytes, ...]:
        self.exports[name.decode()] = [list(self.pages[page].slots) for page in _handles(pages)]
        return ()

    def pages_import(self, queue: int, first: int, name: bytes) -> tuple[bytes, ...]:
        found = self.exports[name.decode()]
        self.pages |= {first + at: _Page(list(slots)) for at, slots in enumerate(found)}
        return (struct.pack("<I", len(found)),)

    def pages_release(self, queue: int, name: bytes) -> tuple[bytes, ...]:
        del self.exports[name.decode()]
        return ()

    def page_mask(self, queue: int, page: int, bits: int) -> None:
        self.pages[page].hidden = bits

    def embed_text(self, queue: int, tokens: bytes, positions: bytes, embeds: bytes) -> None:
        for token, position, embed in zip(unpack_ints(tokens), unpack_ints(positions), _handles(embeds), strict=True):
            assert embed in self.embeds
            self.embeds[embed] = [(position, token)]

    def forward(self, queue: int, read: bytes, inputs: bytes, write: bytes, outputs: bytes, mask: bytes) -> None:
        slots = [self.embeds[embed][0] for embed in _handles(inputs)]
        seen = self._pass(_handles(read), slots, _handles(write), mask)
        targets = _handles(outputs)
        for embed, what in zip(targets, seen[len(seen) - len(targets) :], strict=True):
            assert embed in self.embeds
            self.embeds[embed] = what

    def forward_sample(self, queue: int, *blobs: bytes) -> tuple[bytes, ...]:
        read, tokens, positions, write, mask, about = blobs
        assert set(json.loads(about)) == {"sampling", "index"}
        slots = list(zip(unpack_ints(positions), unpack_ints(tokens), strict=True))
        seen = self._pass(_handles(read), slots, _handles(write), mask)
        return (pack_ints([model.top(_tokens(seen[-1]), 1)[0][0]]),)

    def next_dist(self, queue: int, k: int, embeds: bytes, targets: bytes) -> tuple[bytes, ...]:
        handles, wanted = _handles(embeds), unpack_ints(targets)
        each = len(wanted) // len(handles)
        ids, values, given = [], [], []
        for at, embed in enumerate(handles):
            tokens = _tokens(self.embeds[embed])
            best = model.top(tokens, k)
            ids += [token for token, _ in best]
            values += [value for _, value in best]
            logprobs = model.distribution(tokens)
            given += [logprobs[token] for token in wanted[at * each : (at + 1) * each]]
        return pack_ints(ids), struct.pack(f"<{len(values)}f", *values), struct.pack(f"<{len(given)}f", *given)

    def _pass(self, read: list[int], slots: list[Slot], write: list[int], mask: bytes) -> list[list[Slot]]:
        """What each input sees, itself included."""
        known = [
            (slot, self.pages[page].hidden >> at & 1) for page in read for at, slot in enumerate(self.pages[page].slots)
        ]
        columns = [slot for slot, _ in known] + slots
        hidden = [bool(bit) for _, bit in known] + [False] * len(slots)
        size = (len(columns) + 7) // 8
        seen = []
        for row, (position, _) in enumerate(slots):
            bits = int.from_bytes(mask[row * size : (row + 1) * size], "little")
            seen.append(
                [
                    slot
                    for at, slot in enumerate(columns)
                    if not hidden[at] and (bits >> at & 1 if mask else slot[0] <= position)
                ]
            )
        rest = list(slots)
        for page in write:
            room = model.PAGE - len(self.pages[page].slots)
            self.pages[page].slots += rest[:room]
            rest = rest[room:]
        return seen


def _tokens(seen: list[Slot]) -> list[int]:
    return [token for _, token in sorted(seen)]


def _handles(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))
