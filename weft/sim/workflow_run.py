"""`WorkflowPlayer`: a run of a workflow on simulated engines, driven by their clock.

The decisions are those of `weft serve`: `RunState` says what is to be done, `PlanRounds` orders it, `PrefixKeeper` pins
what plans keep, and no more calls wait at the engines than there. Calls have the hints and the advice of their state.
Plans take no time. Models answer with letters that depend on the prompt alone, as with greedy sampling, so equal
prompts have equal answers. Functions, programs, values from outside and salts are refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.abi.errors import Unsupported
from weft.core.ids import TOKEN_BYTES, pack_tokens
from weft.core.waits import WaitKind
from weft.programs.retains import OnRetained
from weft.sim.cluster import SimulatedCall, SimulatedCluster, SimulatedTimes
from weft.sim.worker import OUTPUT_TOKEN
from weft.workflow.actuals import CallUsage, RunCounts
from weft.workflow.run.calls import CHAT, ModelAnswer, ModelRequest
from weft.workflow.run.instructions import CallModel, RowDone
from weft.workflow.run.keeper import KeptPrefix, PrefixKeeper
from weft.workflow.run.pins import KvPrefix
from weft.workflow.run.plan_rounds import PlanRounds
from weft.workflow.run.state import RunState

UNBOUNDED = 1 << 30
FIRST_LETTER, NUM_LETTERS = 65, 26
_NEAR: Callable[[str], float] = lambda path: 0.0  # noqa: E731


class SpelledPrompts:
    """`weft.workflow.analysis.prompts.PromptTokens` of a model that does not exist: each character is a token, and a
    message has a mark before it and one of two tokens behind it."""

    def __init__(self, *, names_roles: bool = False):
        """The mark before a message has three tokens. With `names_roles` it has the name of the role, so that prompts
        are as long as with the byte tokenizer of random checkpoints."""
        self._names_roles = names_roles

    def chat(self, messages: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        """As `PromptTokens.chat`."""
        said = "".join(f"{self._mark(message['role'])}{message['content']}\x04\n" for message in messages)
        return said + self._mark("assistant")

    def _mark(self, role: str) -> str:
        return f"\x02{role if self._names_roles else role[0]}\x03"

    def encode(self, text: str) -> Sequence[int]:
        """As `PromptTokens.encode`."""
        return [ord(letter) for letter in text]

    def count(self, text: str) -> int:
        """As `PromptTokens.count`."""
        return len(text)

    def packed(self, request: ModelRequest) -> bytes:
        """The packed tokens of a request's prompt."""
        body = request.body
        text = self.chat(body["messages"], body) if request.endpoint == CHAT else body["prompt"]
        return np.frombuffer(text.encode("utf-32-le"), np.int32).tobytes()


def letters_of(prompt: bytes, count: int) -> str:
    """What a model answers to a prompt: letters that depend on the prompt alone."""
    seed = int.from_bytes(hashlib.sha256(prompt).digest()[:8], "little")
    letters = np.random.default_rng(seed).integers(FIRST_LETTER, FIRST_LETTER + NUM_LETTERS, count, np.uint8)
    return letters.tobytes().decode()


class PlayerLimits(NamedTuple):
    """How much of a run is in progress at once."""

    rows: int = UNBOUNDED
    waiting_calls: int = UNBOUNDED
    """Calls that have no first token yet."""
    calls: int = UNBOUNDED
    """Calls that have not ended."""
    operators: Sequence[str] | None = None
    """Labels of all nodes, each after those that it needs: then all rows of one operator end before the next begins."""


class PlayedCall(NamedTuple):
    """A call that has ended."""

    row: int
    path: str
    call: SimulatedCall
    times: SimulatedTimes


class WorkflowPlayer:
    """One run. Its calls are requests of one client; `begin` starts it, and the cluster's `run` carries it out."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        state: RunState,
        rows: Sequence[Mapping[str, Any]],
        limits: PlayerLimits | None = None,
        rounds: PlanRounds | None = None,
        *,
        cache: MutableMapping[str, ModelAnswer] | None = None,
        continues: bool = True,
        prompts: SpelledPrompts | None = None,
        sessions: Callable[[int], str] = lambda row: "",
        round_trip_s: Callable[[str], float] = _NEAR,
        on_call: Callable[[PlayedCall], None] = lambda played: None,
        on_done: Callable[[float], None] = lambda now: None,
    ):
        """`rounds` must have the order of the state; their settings say whether prefixes are kept. The `cache` has
        answers of earlier calls by the keys of their requests. Where a run does not continue, models generate other
        tokens than the answers have, so that no prompt finds the KV of an answer. `sessions` names the session of a
        row's calls, and `round_trip_s` (path of the node) is how long a call is on its way before it reaches an engine:
        of clients that are far away."""
        self.results: dict[int, Mapping[str, Any]] = {}
        """Outputs by row."""
        self.end_s: float | None = None
        """When the last row ended."""
        self._cluster = cluster
        self._state = state
        self._rows: Iterator[tuple[int, Mapping[str, Any]]] = iter(enumerate(rows))
        self._num_rows = len(rows)
        self._limits = limits or PlayerLimits()
        self._rounds = rounds
        self._cache, self._continues = cache, continues
        self._keeper: PrefixKeeper | None = None
        if rounds is not None and rounds.settings.pins:
            self._keeper = PrefixKeeper(rounds, state, _Engines(cluster))
        self._prompts = prompts or SpelledPrompts()
        self._sessions, self._round_trip_s = sessions, round_trip_s
        self._on_call, self._on_done = on_call, on_done
        self._num_calls = self._num_waiting = 0
        self._num_opened = 0
        self._held: dict[str, list[CallModel]] = {}
        """Calls of operators whose turn has not come."""
        self._turn = 0
        self._num_answered = 0
        """Of the operator whose turn it is."""

    @property
    def counts(self) -> RunCounts:
        """What the run has done so far."""
        return self._state.counts

    def begin(self) -> None:
        """Send what can be sent now."""
        self._advance()

    def _advance(self) -> None:
        state = self._state
        while self._num_opened < self._num_rows and state.num_rows < self._limits.rows:
            state.open_row(*next(self._rows))
            self._num_opened += 1
        state.work_all()
        if self._rounds is not None:
            for rows in self._rounds.due(state, is_open=self._num_opened < self._num_rows):
                self._rounds.put(state, rows, self._rounds.ranks(rows))
        limits = self._limits
        for instruction in state.take(limits.calls - self._num_calls, limits.waiting_calls - self._num_waiting):
            if isinstance(instruction, CallModel):
                self._ask(instruction)
            elif isinstance(instruction, RowDone):
                self._row_ended(instruction)
            else:
                raise Unsupported(f"{type(instruction).__name__}: the simulator has calls of models alone")
        if state.has_instructions or (self._num_opened < self._num_rows and state.num_rows < self._limits.rows):
            self._advance()

    def _row_ended(self, done: RowDone) -> None:
        if done.failure is not None:
            raise done.failure.error
        self.results[done.row] = done.outputs
        if self._keeper is not None:
            self._keeper.has_ended(done.row)
        if len(self.results) == self._num_rows:
            if self._keeper is not None:
                self._keeper.close()
            self.end_s = self._cluster.clock.now()
            self._on_done(self.end_s)

    def _ask(self, call: CallModel) -> None:
        if self._limits.operators is not None:
            label = call.task.path
            if label != self._limits.operators[self._turn]:
                self._held.setdefault(label, []).append(call)
                return
        known = None if self._cache is None or not call.may_be_cached else self._cache.get(call.request.key or "")
        if known is not None:
            self._cluster.at(self._cluster.clock.now(), lambda now: self._answered(call, known.again))
            return
        self._num_calls += 1
        self._num_waiting += 1
        delay_s = self._round_trip_s(call.task.path)
        if delay_s:
            self._cluster.at(self._cluster.clock.now() + delay_s, lambda now: self._send(call))
        else:
            self._send(call)

    def _send(self, call: CallModel) -> None:
        request = call.request
        prompt = self._prompts.packed(request)
        text = letters_of(prompt, request.body["max_tokens"])
        hints, following = request.hints, request.advice.next_turn
        if request.body.get("cache_salt"):
            raise Unsupported("cache_salt: simulated engines have one namespace")
        of_clients = WaitKind.CHAT if request.endpoint == CHAT else WaitKind.COMPLETION
        sent = SimulatedCall(
            prompt,
            pack_tokens(list(text.encode()) if self._continues else [OUTPUT_TOKEN] * len(text)),
            objective=hints.get("objective", "latency"),
            deadline_s=hints.get("deadline_s"),
            priority=hints.get("priority", 0),
            session=self._sessions(call.task.row),
            replica=request.advice.replica,
            wait_kind=of_clients if following is None else following.wait_kind,
            expected_in_s=None if following is None else following.in_s,
        )
        begun_with = [] if self._keeper is None else self._keeper.begins_with(call)

        def started(now: float) -> None:
            self._num_waiting -= 1
            if self._keeper is not None:
                self._keeper.has_started(call)
            if self._limits.waiting_calls < UNBOUNDED:
                self._cluster.at(now, lambda _: self._advance())

        def done(times: SimulatedTimes) -> None:
            used = times.usage
            self._num_calls -= 1
            self._on_call(PlayedCall(call.task.row, call.task.path, sent, times))
            usage = CallUsage(
                len(prompt) // TOKEN_BYTES,
                used.num_cached_tokens,
                sent.num_output,
                min(used.num_continued_tokens, used.num_cached_tokens),
                used.num_prefill_tokens,
            )
            answer = ModelAnswer(text, "length", (), usage)
            if self._keeper is not None:
                self._keeper.was_answered(begun_with, answer)
            if self._cache is not None and call.may_be_cached and request.key is not None:
                self._cache[request.key] = answer
            self._answered(call, answer)

        self._cluster.call(sent, done, started)

    def _answered(self, call: CallModel, answer: ModelAnswer) -> None:
        self._state.answered(call.task, answer)
        self._operator_ended()
        # All calls that end with the same step are answered before the next ones are chosen.
        self._cluster.at(self._cluster.clock.now(), lambda _: self._advance())

    def _operator_ended(self) -> None:
        if self._limits.operators is None:
            return
        self._num_answered += 1
        if self._num_answered == self._num_rows and self._turn + 1 < len(self._limits.operators):
            self._turn += 1
            self._num_answered = 0
            for call in self._held.pop(self._limits.operators[self._turn], []):
                self._ask(call)


class _Engines:
    """`KeepsPrefixes` of a cluster's engines."""

    def __init__(self, cluster: SimulatedCluster):
        self._cluster = cluster

    def retain(self, prefix: KvPrefix, pinned_part: float, told: OnRetained) -> KeptPrefix:
        """As `KeepsPrefixes.retain`."""
        return self._cluster.retains[prefix.replica].retain("", "", prefix.tokens, pinned_part, told)
