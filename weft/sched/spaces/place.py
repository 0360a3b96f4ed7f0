"""`Placer`: what each command on the device does to the step being built.

Owns the checks of a command against its space, the budget of inputs, and the pages written. Every check comes before
the first change, so a command that fails has done nothing. `spaces.py` calls it in the order of the queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from weft.abi.errors import InvalidRequest, Unsupported
from weft.core.wire import MAX_DIST, CopyTokens, EmbedText, Forward, ForwardSample, NextDist, QueueCommand
from weft.sched.batch import StepBuilder
from weft.sched.spaces.conflicts import Conflicts, Stage
from weft.sched.spaces.parts import SpaceRow
from weft.sched.spaces.pool import SpacePool
from weft.sched.spaces.resources import EmbedHandle, PageHandle, PendingCommand, Space, handles, int32s
from weft.sched.spaces.rows import Place, explicit_mask, is_rising, make_row

MAX_HEAD_ROWS = 256
"""Rows of full logits that programs may ask of one step, which bounds their memory."""
DECODE_LIKE = 16
"""Inputs of a forward that is as urgent as a decoding sequence's token."""


class Placement(Enum):
    """The outcome of a command."""

    DONE = "done"
    """It is in the step."""
    PART = "part"
    """Some of its inputs are; the rest follows."""
    LATER = "later"
    """Not in this step."""
    BLOCKED = "blocked"
    """It waits for room."""


class _Request(NamedTuple):
    """A forward, resolved."""

    tenant: str
    read: list[PageHandle]
    write: list[PageHandle]
    positions: Sequence[int]
    mask: bytes
    piece: int
    """How many of the last inputs stay together in one step."""
    pending: PendingCommand


class PlacerSizes(NamedTuple):
    """Bounds of one forward of a space: page size, vocabulary, positions and inputs."""

    page_size: int
    vocab_size: int
    max_context: int
    """Positions of the model."""
    max_inputs: int
    """Inputs that fit a step beside all decoding sequences."""


class Placer:
    """Puts commands on spaces into steps. `slots` are the device slots that one-off samplers may use in each step."""

    def __init__(self, pool: SpacePool, *, sizes: PlacerSizes, slots: Sequence[int]):
        self.page_size = sizes.page_size
        self.completed = 0
        """The last step that is done."""
        self._pool = pool
        self._sizes = sizes
        self._slots = slots
        self._scratch: list[int] = []
        self._conflicts = Conflicts()
        self._budget = 0
        self._prompt_budget = 0
        self._head_rows = 0

    def begin(self, conflicts: Conflicts, num_tokens: int, others_wait: bool) -> None:
        """A new step, without commands so far."""
        self._conflicts = conflicts
        self._budget = num_tokens
        self._prompt_budget = num_tokens // 2 if others_wait else num_tokens
        self._head_rows = MAX_HEAD_ROWS

    def place(self, builder: StepBuilder, space: Space, pending: PendingCommand, now: float) -> Placement:
        """Put the command into the step as far as possible. Raises what is wrong with it."""
        return _PLACED_BY[type(pending.command)](self, builder, space, pending.command, pending, now)

    # Copies and embeddings

    def _copy_tokens(
        self, builder: StepBuilder, space: Space, command: CopyTokens, pending: PendingCommand, now: float
    ) -> Placement:
        source, target = space.page(command.source), space.page(command.target)
        size = self.page_size
        for offset in (command.source_offset, command.target_offset):
            if not (0 <= offset < size and 0 < command.count <= size - offset):
                raise InvalidRequest(f"{command.count} tokens from place {offset} on are not within a page of {size}")
        run = (1 << command.count) - 1
        if source.filled >> command.source_offset & run != run:
            raise InvalidRequest(f"page {command.source} has places without a token among those to be copied", "source")
        if target.filled >> command.target_offset & run:
            raise InvalidRequest(f"page {command.target} has tokens at the places to be copied to", "target")
        if not self._conflicts.fits(Stage.COPY, (source.page,), (target.page,)):
            return Placement.LATER
        if self._pool.is_shared(target.page) and not self._pool.own_copy(space, target, now):
            return Placement.BLOCKED
        self._conflicts.add(Stage.COPY, (source.page,), (target.page,))
        self._pool.named()
        builder.add_token_copies(
            source.page * size + command.source_offset, target.page * size + command.target_offset, command.count
        )
        for place in range(command.count):
            target.fill(command.target_offset + place, source.positions[command.source_offset + place])
        return Placement.DONE

    def _embed(
        self, builder: StepBuilder, space: Space, command: EmbedText, pending: PendingCommand, now: float
    ) -> Placement:
        tokens, positions = self._tokens(command.tokens), self._positions(command.positions)
        embeds = [space.embed(number) for number in handles(command.embeds, "embeds")]
        if not len(tokens) == len(positions) == len(embeds):
            raise InvalidRequest(
                f"{len(tokens)} tokens, {len(positions)} positions and {len(embeds)} embeddings do not go together"
            )
        keys = [embed.key for embed in embeds]
        if not self._conflicts.fits(Stage.EMBED, (), keys):
            return Placement.LATER
        self._conflicts.add(Stage.EMBED, (), keys)
        builder.add_embeds(tokens, _slots(embeds))
        for embed, position in zip(embeds, positions, strict=True):
            embed.position, embed.failure = position, None
        return Placement.DONE

    # Forwards

    def _forward(
        self, builder: StepBuilder, space: Space, command: Forward, pending: PendingCommand, now: float
    ) -> Placement:
        inputs = [space.written_embed(number) for number in handles(command.inputs, "inputs")]
        outputs = [space.embed(number) for number in handles(command.outputs, "outputs")]
        positions = [embed.position for embed in inputs]
        if len(outputs) > len(inputs):
            raise InvalidRequest(f"{len(inputs)} inputs have no {len(outputs)} outputs", "outputs")
        if not command.write and not outputs:
            raise InvalidRequest("a forward without pages to write and without outputs has no effect", "write")
        request = self._resolve(space, command, positions, len(outputs), pending)
        reads = [embed.key for embed in inputs]
        writes = [embed.key for embed in outputs]
        start = pending.done
        end, verdict = self._reach(builder, space, request, (reads, writes), now)
        if end <= start:
            return verdict
        row = self._add_row(builder, request, end, None, _slots(inputs[start:end]), now)
        self._conflicts.add(Stage.FORWARD, reads, writes)
        if end < len(inputs):
            return Placement.PART
        if outputs:
            builder.add_stores(row, _slots(outputs))
            for embed, position in zip(outputs, positions[-len(outputs) :], strict=True):
                embed.position, embed.failure = position, None
        return Placement.DONE

    def _forward_sample(
        self, builder: StepBuilder, space: Space, command: ForwardSample, pending: PendingCommand, now: float
    ) -> Placement:
        if not 0 <= command.index < 2**62:
            raise InvalidRequest(f"the number of a draw must be between 0 and 2**62, got {command.index}", "index")
        if not self._slots:
            raise Unsupported("this engine has no device slots to sample single tokens in", "sampling")
        command.sampling.validate(self._sizes.vocab_size)
        if command.sampling.has_penalties or command.sampling.bad_words or command.sampling.logprobs is not None:
            message = "penalties, bad words and log-probabilities need a sequence, not explicit pages"
            raise Unsupported(message, "sampling")
        tokens, positions = self._tokens(command.tokens), self._positions(command.positions)
        if len(tokens) != len(positions):
            raise InvalidRequest(f"{len(tokens)} tokens and {len(positions)} positions do not go together", "positions")
        request = self._resolve(space, command, positions, 1, pending)
        if builder.num_space_samples >= len(self._slots):
            return Placement.LATER
        start = pending.done
        end, verdict = self._reach(builder, space, request, ((), ()), now)
        if end <= start:
            return verdict
        row = self._add_row(builder, request, end, tokens[start:end], None, now)
        if end < len(tokens):
            return Placement.PART
        slot = self._slots[builder.num_space_samples]
        builder.add_space_sample(row, slot, command.sampling, command.index, (space.client, space.number, command.op))
        return Placement.DONE

    def _resolve(
        self,
        space: Space,
        command: Forward | ForwardSample,
        positions: Sequence[int],
        num_outputs: int,
        pending: PendingCommand,
    ) -> _Request:
        if not len(positions):
            raise InvalidRequest("a forward needs at least one input", "inputs")
        write = [space.page(number) for number in handles(command.write, "write")]
        read = space.listed(command.read, "read")
        room = sum(self.page_size - page.filled.bit_count() for page in write)
        left = len(positions) - pending.done
        if write and room < left:
            raise InvalidRequest(f"the pages to write have room for {room} tokens, {left} are given", "write")
        # What no input sees of later ones, and what is kept of earlier ones, may be computed piece by piece.
        can_be_split = bool(write) and not command.mask and is_rising(positions)
        piece = num_outputs if can_be_split else len(positions)
        if piece > self._sizes.max_inputs:
            what = "have outputs" if can_be_split else "see each other, or are not kept,"
            raise InvalidRequest(
                f"{piece} inputs that {what} cannot be split, and at most {self._sizes.max_inputs} fit one step here; "
                "do less at once, and let forwards of prompts have pages to write, rising positions and one output",
                "inputs",
            )
        return _Request(space.tenant, read, write, positions, command.mask, piece, pending)

    def _reach(
        self,
        builder: StepBuilder,
        space: Space,
        request: _Request,
        embeds: tuple[Sequence[int], Sequence[int]],
        now: float,
    ) -> tuple[int, Placement]:
        """Up to which input the step carries it, all its pages made writable; else why not."""
        start = request.pending.done
        end = self._end(builder, request)
        kv = [page.page for page in (*request.read, *request.write)]
        if end <= start or not self._conflicts.fits(Stage.FORWARD, *embeds, kv):
            return start, Placement.LATER
        for page in request.write:
            if self._pool.is_shared(page.page):
                # The copy is made when the step begins: nothing in it may write the page before.
                if not self._conflicts.fits(Stage.COPY, (page.page,), ()):
                    return start, Placement.LATER
                if not self._pool.own_copy(space, page, now):
                    return start, Placement.BLOCKED
        if not request.write:
            scratch = self._pool.take_scratch(space, -(-(end - start) // self.page_size), now)
            if scratch is None:
                return start, Placement.BLOCKED
            self._scratch = scratch
        return end, Placement.DONE

    def _end(self, builder: StepBuilder, request: _Request) -> int:
        """Up to which input the budget goes. The last `piece` inputs stay together, in a step without rows in any
        case: no later one could take more."""
        start, total = request.pending.done, len(request.positions)
        budget = self._budget if builder.num_rows else max(self._budget, request.piece)
        tail = total - request.piece
        if total - start <= (budget if start >= tail else min(budget, DECODE_LIKE)):
            return total
        end = start + min(budget, self._prompt_budget)
        return total if end >= total else min(end, tail)

    def _add_row(
        self,
        builder: StepBuilder,
        request: _Request,
        end: int,
        tokens: Sequence[int] | None,
        slots: Sequence[int] | None,
        now: float,
    ) -> SpaceRow:
        """A row of the inputs from `pending.done` to `end`, which are `tokens` or stored in `slots`."""
        positions = request.positions[request.pending.done : end]
        size = self.page_size
        scratch, self._scratch = self._scratch, []
        write = request.write or [PageHandle.empty(page, size) for page in scratch]
        pages = request.read + [page for page in write if page not in request.read]
        # Of a page that is only written to, a row sees what its own forward puts there.
        words = [page.filled & ~page.hidden for page in request.read]
        written = request.pending.written
        words += [written.get(page, 0) for page in pages[len(words) :]]
        places = _free_places(pages, write, len(positions), size)
        last_positions = [page.last_position for page in write]
        for place, position in zip(places, positions, strict=True):
            pages[place.page].fill(place.offset, position)
            words[place.page] |= 1 << place.offset
        try:
            mask = explicit_mask(request.mask, pages, len(request.read), places) if request.mask else None
            row = make_row(pages, words, places, positions, mask)
        except InvalidRequest:
            for place in places:
                pages[place.page].empty_again(place.offset)
            for page, last_position in zip(write, last_positions, strict=True):
                page.last_position = last_position
            self._pool.drop(request.tenant, scratch, now)
            raise
        if end < len(request.positions):
            for place in places:
                written[pages[place.page]] = written.get(pages[place.page], 0) | 1 << place.offset
        self._conflicts.add(Stage.FORWARD, row.page_ids, [page.page for page in write])
        write_slots = [pages[place.page].page * size + place.offset for place in places]
        added = builder.add_space_row(row, positions, write_slots, tokens, slots)
        self._pool.named()
        self._pool.drop(request.tenant, scratch, now)
        self._budget -= len(positions)
        self._prompt_budget -= len(positions)
        request.pending.done = end
        return added

    # Distributions

    def _next_dist(
        self, builder: StepBuilder, space: Space, command: NextDist, pending: PendingCommand, now: float
    ) -> Placement:
        embeds: list[EmbedHandle] = [space.written_embed(number) for number in handles(command.embeds, "embeds")]
        targets = self._tokens(command.targets)
        most = min(self._sizes.vocab_size, MAX_DIST)
        if not embeds:
            raise InvalidRequest("a distribution needs at least one embedding", "embeds")
        if not 0 <= command.k <= most or (command.k == 0 and not len(targets)):
            raise InvalidRequest(f"a distribution has between 1 and {most} tokens here, got {command.k}", "k")
        if len(embeds) > MAX_HEAD_ROWS:
            raise InvalidRequest(f"at most {MAX_HEAD_ROWS} distributions at once, got {len(embeds)}", "embeds")
        if len(targets) % len(embeds) or len(targets) > MAX_DIST:
            raise InvalidRequest(
                f"{len(targets)} given tokens cannot be divided among {len(embeds)} embeddings, or are more than "
                f"{MAX_DIST}",
                "targets",
            )
        keys = [embed.key for embed in embeds]
        # A given token costs about as much as a distribution. One command alone fits any step.
        num_rows = min(max(len(embeds), len(targets)), MAX_HEAD_ROWS)
        if num_rows > self._head_rows or not self._conflicts.fits(Stage.HEAD, keys, ()):
            return Placement.LATER
        self._conflicts.add(Stage.HEAD, keys, ())
        self._head_rows -= num_rows
        builder.add_space_dist(_slots(embeds), command.k, targets, (space.client, space.number, command.op))
        return Placement.DONE

    # Checks

    def _tokens(self, packed: bytes) -> tuple[int, ...]:
        tokens = int32s(packed, "tokens")
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._sizes.vocab_size):
            raise InvalidRequest(f"token ids must be between 0 and {self._sizes.vocab_size - 1}", "tokens")
        return tokens

    def _positions(self, packed: bytes) -> tuple[int, ...]:
        positions = int32s(packed, "positions")
        last = self._sizes.max_context - 1
        if positions and not (min(positions) >= 0 and max(positions) <= last):
            raise InvalidRequest(f"positions must be between 0 and {last}, the end of the context", "positions")
        return positions


_PLACED_BY: dict[type[QueueCommand], Callable[..., Placement]] = {
    CopyTokens: Placer._copy_tokens,
    EmbedText: Placer._embed,
    Forward: Placer._forward,
    ForwardSample: Placer._forward_sample,
    NextDist: Placer._next_dist,
}
NEEDS_STEP = frozenset(_PLACED_BY)
"""The commands that a step carries."""


def outputs_of(command: QueueCommand) -> bytes:
    """The embeddings that a command was to write, packed."""
    if isinstance(command, Forward):
        return command.outputs
    return command.embeds if isinstance(command, EmbedText) else b""


def _slots(embeds: Sequence[EmbedHandle]) -> list[int]:
    return [embed.slot for embed in embeds]


def _free_places(pages: Sequence[PageHandle], write: Sequence[PageHandle], count: int, size: int) -> list[Place]:
    """The first free places of the pages to write, as places in the row."""
    places: list[Place] = []
    for page in write:
        free = ~page.filled & (1 << size) - 1
        if free:
            index = pages.index(page)
            while free and len(places) < count:
                lowest = free & -free
                places.append(Place(index, lowest.bit_length() - 1))
                free ^= lowest
    return places
