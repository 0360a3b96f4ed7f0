"""What all runs and sessions of a server share for the evaluation of graphs: budgets by tenant, turns, threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from weft.config import WorkflowsConfig
from weft.threads import FairThreads
from weft.workflow.run.bounds import EvaluationBudget
from weft.workflow.run.driver import Turn
from weft.workflow.run.turns import LoopTurns

T = TypeVar("T")


class ServedEvaluations:
    """Used from one event loop."""

    def __init__(self, config: WorkflowsConfig, threads: FairThreads):
        self._config = config
        self._threads = threads
        self._turns = LoopTurns()
        self._runs: WeakValueDictionary[str, EvaluationBudget] = WeakValueDictionary()
        """By tenant, while a run has it."""
        self._sessions: WeakValueDictionary[str, EvaluationBudget] = WeakValueDictionary()

    def of_runs(self, tenant: str) -> EvaluationBudget:
        """The budget of a tenant's runs."""
        made = EvaluationBudget(self._config.max_value_bytes, "workflows.max_value_bytes")
        return self._runs.setdefault(tenant, made)

    def of_sessions(self, tenant: str) -> EvaluationBudget:
        """The budget of a tenant's sessions."""
        made = EvaluationBudget(self._config.max_session_bytes, "workflows.max_session_bytes")
        return self._sessions.setdefault(tenant, made)

    def turn(self, tenant: str) -> Turn:
        """Turns of a tenant's runs and sessions."""
        return partial(self._turns.next, tenant)

    async def on_thread(self, tenant: str, work: Callable[[], T]) -> T:
        """Do work that takes long beside the event loop."""
        return await self._threads.run(work, tenant=tenant)
