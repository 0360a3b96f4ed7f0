"""Collects the runs of a load benchmark, and notes on the validity of their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from weft.abi.errors import WeftError
from weft.cli.bench.clock import LoopWatch
from weft.cli.bench.measure import Failure, Outcome, Targets, Timing, distribution, doubts, load_figures, over_runs
from weft.cli.bench.report import Run


class Results:
    """Figures of every run, by group, and one example of each kind of failure."""

    def __init__(self, targets: Targets):
        self.groups: dict[str, list[Run]] = {}
        self._targets = targets
        self._failures: dict[str, str] = {}

    def add(
        self,
        group: str,
        outcomes: Sequence[Outcome],
        elapsed_s: float,
        watch: LoopWatch,
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Add a run, the lag of the client's event loop, and `more` figures. Raises `WeftError` if every request
        failed."""
        failures = {outcome.kind: outcome.message for outcome in outcomes if isinstance(outcome, Failure)}
        self._failures = failures | self._failures
        if not any(isinstance(outcome, Timing) for outcome in outcomes):
            kind, message = next(iter(failures.items()))
            raise WeftError(f"no request succeeded; an example of a failure ({kind}): {message}")
        figures = load_figures(outcomes, elapsed_s, self._targets) | distribution("client_lag_ms", watch.lags_s)
        self.groups.setdefault(group, []).append({**figures, **more, "client_busy_share": watch.busy_share})

    def add_part(self, group: str, outcomes: Sequence[Outcome], elapsed_s: float) -> None:
        """Add figures of a subset of a run's requests."""
        self.groups.setdefault(group, []).append(load_figures(outcomes, elapsed_s, self._targets))

    def notes(self) -> list[str]:
        """Return one line per kind of failure and per reason to doubt the client's figures."""
        notes = [f"requests failed ({kind}); example: {message}" for kind, message in self._failures.items()]
        for group, runs in self.groups.items():
            medians = {name: spread.median for name, spread in over_runs(runs).items()}
            notes += [f"{group}: {doubt}" if group else doubt for doubt in doubts(medians)]
        return notes
