"""The best order of a few calls on one engine, by a search over sets of calls that are done.

Layer by layer, one call more in each: of the ways to have done the same calls with the same one last, those that are
later in every respect are dropped, and so are those whose lower bound reaches the best order known.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.workflow.planner.cost import ScheduleProblem


class Optimum(NamedTuple):
    order: tuple[int, ...]
    """The best order found."""
    makespan: int
    bound: int
    """No order is better than this; equal to `makespan` where that is proven."""

    @property
    def is_proven(self) -> bool:
        return self.bound >= self.makespan


class _State(NamedTuple):
    clock: int
    releases: tuple[int, ...]
    """[groups] when each group that is not done may start, given those done; 0 for done ones."""
    order: tuple[int, ...]


class ExactSearch:
    """The optimum of problems on one engine, of single calls."""

    def __init__(self, problem: ScheduleProblem, max_states: int = 300_000):
        if problem.num_engines != 1 or any(group.first is not None for group in problem.groups):
            raise ValueError("only single calls on one engine")
        self._problem = problem
        self._usages = [group.usage for group in problem.groups]
        self._needs = [{need for need, _ in group.needs} for group in problem.groups]
        self._dependents = problem.dependents()
        self._size = len(problem.groups)
        self._max_states = max_states

    def run(self, known: tuple[int, ...]) -> Optimum:
        """From a known order on."""
        best, limit = known, self._problem.timing(known).makespan
        layer = {(0, -1): [_State(0, (0,) * self._size, ())]}
        seen = 0
        for _ in range(self._size):
            following: dict[tuple[int, int], list[_State]] = {}
            for (done, last), states in sorted(layer.items()):
                for state in states:
                    for group in range(self._size):
                        if not done >> group & 1 and all(done >> need & 1 for need in self._needs[group]):
                            after = self._after(state, last, group)
                            if self._bound(after, done | 1 << group, group) < limit:
                                _keep(following.setdefault((done | 1 << group, group), []), after)
            seen += sum(map(len, following.values()))
            if seen > self._max_states:
                bounds = [self._bound(state, *key) for key, states in layer.items() for state in states]
                return Optimum(best, limit, min([*bounds, limit]))
            layer = following
        for states in layer.values():
            for state in states:
                if state.clock < limit:
                    best, limit = state.order, state.clock
        return Optimum(best, limit, limit)

    def _after(self, state: _State, last: int, group: int) -> _State:
        usage = self._usages[group] - (self._problem.savings[last][group] if last >= 0 else 0)
        clock = max(state.clock, state.releases[group]) + usage
        releases = list(state.releases)
        releases[group] = 0
        for dependent, delay in self._dependents[group]:
            releases[dependent] = max(releases[dependent], clock + delay)
        # A release before the clock says nothing.
        return _State(clock, tuple(r if r > clock else 0 for r in releases), (*state.order, group))

    def _bound(self, state: _State, done: int, last: int) -> int:
        """Jackson's bound: from the earliest start of some calls, all their usage, and the shortest tail after one."""
        left = [group for group in range(self._size) if not done >> group & 1]
        if not left:
            return state.clock
        savings = self._problem.savings
        before = [*left, last]
        least = {j: self._usages[j] - max(savings[i][j] for i in before if i != j) for j in left}
        heads = {j: max(state.clock, state.releases[j]) for j in left}
        for _ in left:
            changed = False
            for j in left:
                for dependent, delay in self._dependents[j]:
                    if heads[j] + least[j] + delay > heads[dependent]:
                        heads[dependent] = heads[j] + least[j] + delay
                        changed = True
            if not changed:
                break
        tails = dict.fromkeys(left, 0)
        for j in sorted(left, key=lambda j: -heads[j]):  # whatever needs j has a later head
            for dependent, delay in self._dependents[j]:
                tails[j] = max(tails[j], delay + least[dependent] + tails[dependent])
        bound = 0
        for tail in {tails[j] for j in left}:
            work = 0
            for j in sorted((j for j in left if tails[j] >= tail), key=lambda j: -heads[j]):
                work += least[j]
                bound = max(bound, heads[j] + work + tail)
        return bound


def _keep(states: list[_State], new: _State) -> None:
    """Add a state unless another is as early in every respect; drop those for which it is."""
    for state in states:
        if state.clock <= new.clock and all(
            a <= b or a <= new.clock for a, b in zip(state.releases, new.releases, strict=True)
        ):
            return
    states[:] = [
        state
        for state in states
        if not (
            new.clock <= state.clock
            and all(a <= b or a <= state.clock for a, b in zip(new.releases, state.releases, strict=True))
        )
    ]
    states.append(new)
