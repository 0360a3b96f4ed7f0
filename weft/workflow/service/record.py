"""The record of a run on a server: what was asked for, how far it is, how it ended."""

from __future__ import annotations

import secrets

import msgspec

from weft.abi.errors import StorageFailed
from weft.core.wire import ErrorRecord
from weft.programs.run.runs import Status
from weft.store.served_runs import StoredRun
from weft.workflow.actuals import RunCounts
from weft.workflow.analysis.objectives import OutputObjectives, WantedOutputs
from weft.workflow.run.instructions import RunLimits
from weft.workflow.run.settings import PlanSettings

UNREADABLE_RUN = "the stored record of this run cannot be read"
PREFIX = "wrun-"
"""Of the ids of runs of workflows; those of programs begin otherwise."""


class WorkflowRunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a workflow is to be run."""

    limits: RunLimits = RunLimits()
    cache: bool = True
    """Whether calls may have answers of equal earlier ones of the tenant."""
    optimise: bool = True
    """Whether the optimiser may rewrite the graph first."""
    model: str | None = None
    """A served name, for calls that name none."""
    priority: int = 0
    cache_salt: str | None = None
    functions: tuple[str, ...] = ()
    """Functions that the client calls: the run waits for their results."""
    stream: tuple[str, ...] = ()
    """Outputs whose texts are told while they are generated."""
    starts: bool = False
    """Whether starts of calls are told."""
    objective: OutputObjectives = "throughput"
    deadline_s: float | None = None
    """Of outputs with a deadline, from the first start of the run."""
    planning: PlanSettings = PlanSettings()

    @property
    def wanted(self) -> WantedOutputs:
        """What the outputs are wanted for."""
        return WantedOutputs(self.objective, self.deadline_s)


def cache_identity(weights: str, model: str, salt: str | None) -> str:
    """What answers in the prompt cache depend on besides tenant and call: `weights` of the models, and the `model` of
    calls that name none."""
    return f"{weights} {model} {salt or ''}"


class WorkflowRunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Times are seconds since 1970."""

    id: str
    tenant: str
    workflow: str
    """The digest of the graph."""
    name: str
    """Of the workflow when the run began."""
    model: str
    """The served name for calls that name none; empty where every call names one."""
    spec: WorkflowRunSpec
    models: tuple[str, ...]
    """Served names of the models that calls ask."""
    weights: str
    """The weights and the precision of these models."""
    status: Status = "queued"
    error: ErrorRecord | None = None
    created_s: float
    started_s: float | None = None
    finished_s: float | None = None
    num_rows: int
    counts: RunCounts = RunCounts()
    """What the run has done, as clients see it."""
    ended_counts: RunCounts = RunCounts()
    """What calls of rows did whose results are kept: where a later execution goes on."""
    largest_row: int
    """Bytes of the largest row of inputs."""
    stored: str = ""
    """The `journal_digest` of the graph; empty before the first start. Values from outside are kept by its ids."""
    executed: str = ""
    """The `journal_digest` of what the optimiser made of the graph; empty before the first start. Values of nodes are
    those of this graph."""
    request: str
    """The digest of what was asked for: a second request with the same key must have the same."""
    is_readable: bool = True
    """False for what stands for a record that is stored and cannot be read."""

    @property
    def ended(self) -> bool:
        """Whether the run has ended. One that failed or was cancelled can be resumed."""
        return self.status in ("finished", "failed", "cancelled")


def decoded_run(stored: StoredRun) -> WorkflowRunRecord:
    """The record of a stored run; one that cannot be read is that of a failed run, which can be deleted."""
    try:
        return msgspec.json.decode(stored.record, type=WorkflowRunRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return WorkflowRunRecord(
            id=stored.run,
            tenant=stored.tenant,
            workflow="",
            name="",
            model="",
            spec=WorkflowRunSpec(),
            models=(),
            weights="",
            status="failed",
            error=ErrorRecord.of(StorageFailed(f"{UNREADABLE_RUN} ({error}): delete it, and start it anew")),
            created_s=stored.created_s,
            finished_s=stored.created_s,
            num_rows=0,
            largest_row=1,
            request="",
            is_readable=False,
        )


def new_workflow_run_id() -> str:
    """A new id that cannot be guessed."""
    return PREFIX + secrets.token_hex(12)


def is_workflow_run(id: str) -> bool:
    """Whether an id is of a run of a workflow."""
    return id.startswith(PREFIX)
