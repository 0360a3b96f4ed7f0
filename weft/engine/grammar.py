"""Grammars: compiled once for each tenant, followed token by token, and turned into masks for the sampling half of a
step.

Owns llguidance, the threads that compile, and the grammars compiled so far. Tenants take turns on those threads: a
tenant with many grammars delays only its own. Commands that need one that is still being compiled wait in `Compiling`,
in their order, and with them the commands that follow on the same sequences; no others.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from msgspec.structs import replace

from weft.abi.errors import InvalidRequest, Overloaded, Unsupported
from weft.core.grammar import Grammar
from weft.core.ids import unpack_tokens
from weft.core.step import LateInputs, Step
from weft.core.wire import Cancel, Command, Fork, Generate, Release, Truncate
from weft.engine.conflicts import conflict
from weft.engine.digits import DigitRun, DigitTokens
from weft.engine.grammar_text import MAX_JSON_STRING_CHARS, compiled_grammar, max_digits, short
from weft.engine.guide import Guide, TriggeredGuide
from weft.sched.in_flight import InFlight
from weft.sched.sequence import GenerateOp
from weft.tenant_cache import TenantCache
from weft.threads import Charge, FairThreads
from weft.worker.memory import usable_cores

MAX_GRAMMAR_BYTES = 256 << 10
MAX_FLAT_BYTES = 2 << 20
"""Of a grammar of at most `FLAT_LINES` lines, such as a choice among many texts."""
FLAT_LINES = 4
MAX_TENANT_COMPILED, MAX_COMPILED = 64, 256
"""Grammars of one tenant, and of all, that are kept for its next request with the same one."""
STACK_BYTES = 256 << 20
"""Of a thread that compiles. llguidance calls itself once for each rule that is within others, and a stack that ends
ends the process: the deepest grammar of `MAX_GRAMMAR_BYTES` takes 55 MiB of it."""
COMPILING_THREADS = 3
TENANT_COMPILING_THREADS = 2
MOST_MASK_THREADS = 8
MAX_GREEDY_BYTES = 32
"""Of a token that is looked for in a text that the tokenizer cannot encode byte for byte: it bounds the time."""
PREFIXES = ("", "\n", ".")
"""Texts that may stand before a text to be encoded, so that the tokenizer adds no space to the text itself. None of
them is part of a longer token in usual vocabularies of SentencePiece."""

_log = logging.getLogger("weft.engine")

Encode = Callable[[str], bytes]
"""From text to packed tokens, without special ones around them."""
TenantOf = Callable[[int, int], str]
"""(client, sequence) -> tenant; empty for a sequence that is not open."""


class Grammars:
    """The grammars of one engine, over its tokens.

    Each tenant has its own: shared ones would tell a tenant, by the time until its first token, which grammars others
    use, and a tenant with many grammars would evict those of all others.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Iterable[int],
        eos_ids: Sequence[int],
        encode: Encode | None,
        *,
        max_string_chars: int | None = MAX_JSON_STRING_CHARS,
    ):
        """`token_bytes` has an entry for every row of the model's vocabulary. `encode` makes tokens of a text: where a
        grammar leaves but one text, it is written in the tokens that the model knows it in. `max_string_chars` limits
        strings whose JSON schema does not, and the digits of numbers."""
        self._max_string_chars = max_string_chars
        self._token_bytes, self._special_ids, self._eos_ids = token_bytes, special_ids, list(eos_ids)
        self._encode = encode
        self._tokenizer: LLTokenizer | None = None
        self._digits: DigitTokens | None = None
        self._lock = threading.Lock()
        self._words = -(-len(token_bytes) // 32)
        self._executor = LLExecutor(max(1, min(MOST_MASK_THREADS, usable_cores() // 4)))
        self._threads = FairThreads(
            COMPILING_THREADS, per_tenant=TENANT_COMPILING_THREADS, name="weft-grammar", stack_bytes=STACK_BYTES
        )
        self._held: Counter[tuple[str, Grammar]] = Counter()
        self._compiled: TenantCache[Grammar, Future[LLMatcher]] = TenantCache(
            MAX_TENANT_COMPILED, MAX_COMPILED, lambda tenant, grammar: (tenant, grammar) in self._held
        )
        """The matchers are to be copied."""

    def hold(self, grammar: Grammar, tenant: str = "", charge: Charge | None = None) -> Future[LLMatcher]:
        """Begin to compile a grammar that a command waits for, as `compiled`. It is kept until `let_go` was called as
        often."""
        self._held[tenant, grammar] += 1
        return self.compiled(grammar, tenant, charge)

    def let_go(self, grammar: Grammar, tenant: str = "") -> None:
        """A command that `hold` counted is done with its grammar. What no command waits for any more may be forgotten,
        and is not compiled if that has not begun."""
        self._held[tenant, grammar] -= 1
        if self._held[tenant, grammar]:
            return
        del self._held[tenant, grammar]
        matcher = self._compiled.peek(tenant, grammar)
        if matcher is not None and matcher.cancel():
            self._compiled.pop(tenant, grammar)

    def is_ready(self, grammar: Grammar, tenant: str = "") -> bool:
        """Whether `guide` would answer at once; begins to compile where the tenant did not ask before."""
        return self.compiled(grammar, tenant).done()

    def guide(self, grammar: Grammar, tenant: str = "") -> Guide:
        """A guide at the beginning of the grammar. Raises `InvalidRequest`, saying what is wrong with it, and
        `Overloaded` where no thread could be started to compile it."""
        try:
            matcher = self.compiled(grammar, tenant).result()
        except Overloaded:
            self._compiled.pop(tenant, grammar)  # the next request tries again
            raise
        if grammar.trigger is None:
            most = max_digits(grammar, self._max_string_chars)
            return Guide(matcher.deep_copy(), DigitRun(self._digit_tokens(), most) if most else None)
        return TriggeredGuide(matcher, grammar.trigger, self._token_bytes)

    def compiled(self, grammar: Grammar, tenant: str = "", charge: Charge | None = None) -> Future[LLMatcher]:
        """The matcher to copy, once it is made, in the tenant's turn. `charge` is called on a thread, with the
        processor time."""
        matcher = self._compiled.get(tenant, grammar)
        if matcher is None:
            matcher = self._threads.submit(partial(self._compile, grammar), tenant=tenant, charge=charge)
            self._compiled.put(tenant, grammar, matcher)
        return matcher

    def masks(self, step: Step, flight: InFlight) -> LateInputs:
        """The masks that the samplers of a launched step wait for, once the tokens of all steps before are known.

        A sampler whose generation has ended meanwhile, or whose grammar does not hold yet, gets none. A fault with one
        mask fails the generation that it is for, at its next token, and no other.
        """
        if step.sampling is None:
            return LateInputs()
        waiting = np.flatnonzero(step.sampling.late_mask).astype(np.int32)
        if not len(waiting):
            return LateInputs()
        masked = []
        matchers: list[tuple[LLMatcher, int]] = []
        for index in waiting.tolist():
            sequence, epoch = flight.sampled[index]
            op = sequence.ops[0] if sequence.epoch == epoch and sequence.ops else None
            guide = _guide_of(op)
            if isinstance(op, GenerateOp) and guide is not None and not guide.error and guide.matcher is not None:
                matchers.append((guide.matcher, len(matchers)))
                masked.append((index, guide, op.sampling, sequence.tokens))
        masks = np.empty((len(matchers), self._words), np.uint32)
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, self._words * 4, len(masks))
        for (_, guide, sampling, tokens), mask in zip(masked, masks, strict=True):
            try:
                if guide.digits is not None:
                    guide.digits.bound(mask)
                guide.conflict = conflict(sampling, mask, tokens)
            except Exception as error:  # the other generations of the step go on
                _log.exception("the mask of a grammar could not be made; its request fails")
                guide.conflict = f"the grammar cannot be followed: {type(error).__name__}: {short(str(error))}"
        samplers = np.array([index for index, *_ in masked], np.int32)
        return LateInputs(samplers, masks, np.setdiff1d(waiting, samplers).astype(np.int32))

    def close(self) -> None:
        """Stop the compiling threads; grammars that wait are never compiled."""
        self._threads.close()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar, on a thread with a large stack. Raises `InvalidRequest`."""
        is_flat = grammar.kind == "lark" and grammar.text.count("\n") < FLAT_LINES
        most = MAX_FLAT_BYTES if is_flat else MAX_GRAMMAR_BYTES
        if len(grammar.text.encode()) > most:
            raise InvalidRequest(f"the grammar is longer than {most >> 10} KiB; make it smaller", "grammar")
        return compiled_grammar(grammar, self._vocabulary(), self._max_string_chars)

    def _vocabulary(self) -> LLTokenizer:
        """Made when the first grammar comes: a large vocabulary takes a moment."""
        with self._lock:
            if self._tokenizer is None:
                if not self._token_bytes or not self._eos_ids or self._encode is None:
                    raise Unsupported("this engine knows no text of its tokens, so it follows no grammar", "grammar")
                vocabulary = _Vocabulary(self._token_bytes, self._special_ids, self._eos_ids[0], self._encode)
                self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._eos_ids)
            return self._tokenizer

    def _digit_tokens(self) -> DigitTokens:
        """Made when the first grammar of JSON comes."""
        if self._digits is None:
            self._digits = DigitTokens(self._token_bytes)
        return self._digits


class _Waiting:
    """One command that waits."""

    __slots__ = ("command", "tenant")

    def __init__(self, command: Command, tenant: str):
        self.command = command
        self.tenant = tenant
        """Under which its grammar is held."""


class _WaitingCommands:
    """Commands on sequences of one tenant, in order."""

    def __init__(self, tenant: str):
        self.tenant = tenant
        self._waiting: deque[_Waiting] = deque()
        self._generates: dict[int, deque[_Waiting]] = {}
        """The `Generate` among them by sequence, but for those that were ended."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def first(self) -> _Waiting:
        """The command whose turn is next."""
        return self._waiting[0]

    def append(self, command: Command) -> None:
        """Add a command as the last one."""
        self._add(_Waiting(command, self.tenant))

    def extend(self, others: _WaitingCommands) -> None:
        """Add all commands of another queue."""
        for waiting in others._waiting:
            self._add(waiting)

    def popleft(self) -> _Waiting:
        """Remove and return the first command."""
        waiting = self._waiting.popleft()
        command = waiting.command
        if isinstance(command, Generate):
            generates = self._generates.get(command.seq)
            if generates and generates[0] is waiting:
                generates.popleft()
                if not generates:
                    del self._generates[command.seq]
        return waiting

    def end(self, seq: int) -> list[_Waiting]:
        """Take the grammars from every `Generate` that waits on a sequence. Returns the commands as they were."""
        ended = []
        for waiting in self._generates.pop(seq, ()):
            assert isinstance(waiting.command, Generate)
            ended.append(_Waiting(waiting.command, waiting.tenant))
            waiting.command = replace(waiting.command, grammar=None)
        return ended

    def _add(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        if isinstance(waiting.command, Generate):
            self._generates.setdefault(waiting.command.seq, deque()).append(waiting)


class Compiling:
    """Commands that wait for a grammar, in order."""

    def __init__(self, grammars: Grammars, apply: Callable[[int, list[Command]], None], tenant_of: TenantOf):
        """`apply` carries out commands of a client whose turn has come."""
        self._grammars = grammars
        self._apply = apply
        self._tenant_of = tenant_of
        self._queues: dict[tuple[int, int], _WaitingCommands] = {}
        """By (client, sequence): what its sequences wait with. A fork that waits shares its parent's."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def take(self, client: int, commands: Iterable[Command]) -> None:
        """Carry commands out, now or when their turn comes."""
        ready: list[Command] = []
        for command in commands:
            grammar = command.grammar if isinstance(command, Generate) else None
            if grammar is not None and ready:  # its sequence may be opened by them
                self._apply(client, ready)
                ready = []
            if (self._queues or grammar is not None) and self._waits(client, command):
                continue
            ready.append(command)
            if grammar is not None:  # at once, before the next one makes this one be forgotten
                self._apply(client, ready)
                ready = []
        if ready:
            self._apply(client, ready)

    def advance(self) -> None:
        """Carry out what no longer has to wait."""
        for key, queue in list(self._queues.items()):
            while queue and self._may_go(key[0], queue.first):
                waiting = queue.popleft()
                self._apply(key[0], [waiting.command])
                self._let_go(waiting)
            if not queue:
                self._queues.pop(key, None)

    def drop_client(self, client: int) -> list[int]:
        """Forget what a client that is gone has asked for. Returns the operations that it may wait for."""
        dropped = []
        for key in [key for key in self._queues if key[0] == client]:
            queue = self._queues.pop(key)
            while queue:
                waiting = queue.popleft()
                self._let_go(waiting)
                dropped.append(getattr(waiting.command, "op", 0))
        return [op for op in dropped if op]

    def _waits(self, client: int, command: Command) -> bool:
        """Whether a command has to wait; then it is in a queue."""
        key = client, getattr(command, "seq", 0)
        queue = self._queues.get(key)
        if queue is None:
            if not isinstance(command, Generate):
                return False
            tenant = self._tenant_of(*key)
            if self._is_ready(command, tenant):
                return False
            queue = self._queues[key] = _WaitingCommands(tenant)
        if isinstance(command, Fork):
            self._join(queue, client, command.child)
        if isinstance(command, (Cancel, Release, Truncate)):
            # They need not wait for grammars any longer.
            for ended in queue.end(command.seq):
                self._let_go(ended)
        queue.append(command)
        if isinstance(command, Generate) and command.grammar is not None:
            self._grammars.hold(command.grammar, queue.tenant)
        return True

    def _join(self, queue: _WaitingCommands, client: int, child: int) -> None:
        """Let a fork share its parent's queue. What waits with the fork's number already, said of an earlier sequence
        or one that was never opened, goes before the fork."""
        earlier = self._queues.get((client, child))
        if earlier is not None and earlier is not queue:
            queue.extend(earlier)
            for key in [key for key, waiting in self._queues.items() if waiting is earlier]:
                self._queues[key] = queue
        self._queues[client, child] = queue

    def _let_go(self, waiting: _Waiting) -> None:
        command = waiting.command
        if isinstance(command, Generate) and command.grammar is not None:
            self._grammars.let_go(command.grammar, waiting.tenant)

    def _may_go(self, client: int, waiting: _Waiting) -> bool:
        command = waiting.command
        if not isinstance(command, Generate):
            return True
        # A number may be of another sequence by now; `guide` waits for the grammar of that one's tenant.
        return self._is_ready(command, self._tenant_of(client, command.seq) or waiting.tenant)

    def _is_ready(self, command: Generate, tenant: str) -> bool:
        return command.grammar is None or self._grammars.is_ready(command.grammar, tenant)


class _Vocabulary:
    """Tokens as llguidance wants to see them.

    It asks for the tokens of a text where a grammar leaves no other, and allows the first of them alone. So their bytes
    must be the text's: a tokenizer that puts a space before a text (Llama 2) or normalizes it (NFC) answers otherwise.
    """

    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes], special_ids: Iterable[int], eos_id: int, encode: Encode):
        self.tokens = list(token_bytes)
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_id
        self._encode = encode
        self._specials = frozenset(self.special_token_ids)
        self._prefix = next((prefix for prefix in PREFIXES if self._behind(prefix, "yes") is not None), None)
        """The text to encode a text behind; None where none of them helps."""

    def __call__(self, text: str) -> list[int]:
        found = None if self._prefix is None else self._behind(self._prefix, text)
        return self._greedy(text.encode()) if found is None else found

    def _behind(self, prefix: str, text: str) -> list[int] | None:
        """The tokenizer's tokens of a text that stands behind a prefix; None unless their bytes are those of the
        text."""
        before = unpack_tokens(self._encode(prefix)).tolist() if prefix else []
        tokens = unpack_tokens(self._encode(prefix + text)).tolist()
        found = tokens[len(before) :]
        if tokens[: len(before)] != before or not self._specials.isdisjoint(found):
            return None
        known = self.tokens
        data = b"".join(known[token] for token in found if token < len(known))
        return found if data == text.encode() else None

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each place, up to the first byte that is no token."""
        by_bytes, sizes = self._by_bytes
        found, at = [], 0
        while at < len(data):
            token = None
            for size in sizes.get(data[at : at + 2], ()):
                token = by_bytes.get(data[at : at + size])
                if token is not None:
                    break
            if token is None:
                token, size = by_bytes.get(data[at : at + 1]), 1
            if token is None:
                break
            found.append(token)
            at += size
        return found

    @cached_property
    def _by_bytes(self) -> tuple[dict[bytes, int], dict[bytes, list[int]]]:
        """The tokens by their bytes; the sizes of those of two bytes and more by their first two bytes, longest first.
        Of tokens with the same bytes it is the last: in SentencePiece the first is the one that stands for a byte."""
        by_bytes = {
            data: token
            for token, data in enumerate(self.tokens)
            if 0 < len(data) <= MAX_GREEDY_BYTES and token not in self._specials
        }
        sizes: dict[bytes, set[int]] = {}
        for data in by_bytes:
            if len(data) > 1:
                sizes.setdefault(data[:2], set()).add(len(data))
        return by_bytes, {head: sorted(found, reverse=True) for head, found in sizes.items()}


def _guide_of(op: object) -> Guide | None:
    return op.guide if isinstance(op, GenerateOp) and isinstance(op.guide, Guide) else None
