"""Which prefixes a run keeps in the KV cache, and when: events in, decisions out. Pure.

A prefix is retained when the first call that begins with it has its first token: then its KV is there, whole, and
computed once. It is let go when no call is left that the plan keeps it for. A retain may be refused, or end before its
time because the engine needs the pages; then calls compute the prefix again, and the next one that does retains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from weft.abi.errors import Unsupported, WeftError
from weft.core.ids import TOKEN_BYTES
from weft.workflow.actuals import PinCounts
from weft.workflow.graph.labels import outer_node
from weft.workflow.planner.ranks import PlannedPin

MAX_REFUSALS = 4
"""Of a prefix, one after the other; then the run does without it."""


class KvPrefix(NamedTuple):
    """Tokens whose KV an engine keeps."""

    model: str
    replica: int
    """Number of the engine among those of the model."""
    salt: str | None
    tokens: bytes
    """Packed int32."""

    @property
    def num_tokens(self) -> int:
        """How many tokens."""
        return len(self.tokens) // TOKEN_BYTES


class _Pinned:
    """A prefix while calls are left that it is kept for."""

    __slots__ = ("is_asked", "is_kept", "labels", "left", "num_kept", "num_refused")

    def __init__(self) -> None:
        self.labels: set[str] = set()
        self.left: dict[int, set[str]] = {}
        """By row: outer nodes whose calls are to come."""
        self.is_asked = False
        """An engine was asked to keep it, and has not answered."""
        self.is_kept = False
        self.num_kept = 0
        """Tokens that the engine keeps: fewer than asked for where prompts turned out to begin otherwise."""
        self.num_refused = 0


class RunPins:
    """The prefixes of one run."""

    def __init__(self) -> None:
        self.counts = PinCounts()
        self._prefixes: dict[KvPrefix, _Pinned] = {}
        self._by_label: dict[str, list[KvPrefix]] = {}
        self._of_row: dict[int, dict[str, set[KvPrefix]]] = {}
        """By row and outer node: what it is one of the uses of."""
        self._is_off = False
        """The engines keep nothing."""

    # ---- plans

    def plan(
        self, pins: Sequence[PlannedPin], rows: Sequence[int], moved: Set[int], in_progress: Set[int]
    ) -> list[KvPrefix]:
        """A plan of these rows, in its order; `moved` are those of them that follow it, and no longer an earlier one.
        Returns what is not wanted any more."""
        known = dict(self._prefixes)
        gone = self._without({*moved, *(row for row in self._of_row if row not in in_progress)})
        if self._is_off:
            return gone
        for pin in pins:
            prefix = KvPrefix(pin.model, pin.replica, pin.salt, pin.tokens)
            for label, ranges in pin.rows.items():
                for first, end in ranges:
                    for row in rows[first:end]:
                        if row in moved:
                            # What this plan wants again is kept as it was.
                            self._add(prefix, label, row, known.get(prefix))
        return [prefix for prefix in gone if prefix not in self._prefixes]

    def _add(self, prefix: KvPrefix, label: str, row: int, before: _Pinned | None) -> None:
        pinned = self._prefixes.setdefault(prefix, before or _Pinned())
        if label not in pinned.labels:
            pinned.labels.add(label)
            self._by_label.setdefault(label, []).append(prefix)
        outer = outer_node(label)
        pinned.left.setdefault(row, set()).add(outer)
        self._of_row.setdefault(row, {}).setdefault(outer, set()).add(prefix)

    # ---- calls

    def begins_with(self, label: str) -> list[KvPrefix]:
        """The prefixes that an engine keeps now and a call of this node begins with."""
        return [prefix for prefix in self._by_label.get(label, ()) if self._prefixes[prefix].is_kept]

    def has_started(self, label: str) -> list[KvPrefix]:
        """A call of this node has its first token. Returns what is to be retained now."""
        wanted = []
        for prefix in self._by_label.get(label, ()):
            pinned = self._prefixes[prefix]
            if not (pinned.is_asked or pinned.is_kept) and pinned.num_refused < MAX_REFUSALS and not self._is_off:
                pinned.is_asked = True
                wanted.append(prefix)
        return wanted

    def was_retained(self, prefix: KvPrefix, num_tokens: int) -> None:
        """An engine keeps so many tokens of a prefix."""
        pinned = self._prefixes.get(prefix)
        self.counts = self.counts._replace(retained=self.counts.retained + 1, tokens=self.counts.tokens + num_tokens)
        if pinned is not None:
            pinned.is_asked, pinned.is_kept, pinned.num_refused = False, True, 0
            pinned.num_kept = num_tokens

    def was_refused(self, prefix: KvPrefix, error: WeftError) -> list[KvPrefix]:
        """An engine does not keep a prefix. Returns what is not wanted any more: all, where the engine keeps
        nothing."""
        self.counts = self.counts._replace(refused=self.counts.refused + 1, refusal=error.message)
        pinned = self._prefixes.get(prefix)
        if pinned is not None:
            pinned.is_asked = False
            pinned.num_refused += 1
        if not isinstance(error, Unsupported):
            return []
        self._is_off = True
        return self.close()

    def was_answered(self, begun_with: Iterable[KvPrefix], cached_tokens: int) -> list[KvPrefix]:
        """A call has ended that began when an engine kept these prefixes, and found so many tokens. Returns those that
        the engine had given up: they are to be let go, and retained anew, since the call has computed them."""
        lost = []
        for prefix in begun_with:
            pinned = self._prefixes.get(prefix)
            if pinned is not None and pinned.is_kept and cached_tokens < pinned.num_kept:
                pinned.is_kept, pinned.is_asked = False, True
                self.counts = self.counts._replace(broken=self.counts.broken + 1)
                lost.append(prefix)
        return lost

    def has_settled(self, row: int, node: str) -> list[KvPrefix]:
        """An outer node of a row has its value, or never will. Returns what is not wanted any more."""
        prefixes = self._of_row.get(row, {}).pop(node, None)
        return [] if not prefixes else [prefix for prefix in prefixes if self._is_last(prefix, row, {node})]

    def has_ended(self, row: int) -> list[KvPrefix]:
        """A row has ended. Returns what is not wanted any more."""
        return self._without({row})

    def close(self) -> list[KvPrefix]:
        """The run is over. Returns all that was wanted."""
        prefixes = list(self._prefixes)
        self._prefixes.clear()
        self._by_label.clear()
        self._of_row.clear()
        return prefixes

    # ---- inside

    def _without(self, rows: set[int]) -> list[KvPrefix]:
        gone = []
        for row in sorted(rows & self._of_row.keys()):
            by_node = self._of_row.pop(row)
            for prefix in dict.fromkeys(prefix for prefixes in by_node.values() for prefix in prefixes):
                if self._is_last(prefix, row, set(by_node)):
                    gone.append(prefix)
        return gone

    def _is_last(self, prefix: KvPrefix, row: int, nodes: set[str]) -> bool:
        """Strike out uses of a prefix. Whether none is left; then it is forgotten."""
        pinned = self._prefixes[prefix]
        left = pinned.left[row]
        left -= nodes
        if not left:
            del pinned.left[row]
        if pinned.left:
            return False
        del self._prefixes[prefix]
        for label in pinned.labels:
            self._by_label[label].remove(prefix)
        pinned.labels.clear()
        return True
