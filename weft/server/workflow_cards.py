"""The forms of workflows' runs in the API: a record as a card, results as a page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from weft.programs.run.runs import RunUsage
from weft.server.schemas.programs import RunCard, RunError
from weft.server.schemas.workflows import (
    NodeCalls,
    PinCard,
    RowList,
    StartedCall,
    VariableWait,
    WorkflowLimits,
    WorkflowProgress,
)
from weft.store.served_runs import NumberedResult
from weft.workflow.actuals import CallCounts
from weft.workflow.run.feed import CallStarted
from weft.workflow.service.live_run import RunWait, WorkflowRun
from weft.workflow.service.record import WorkflowRunRecord

MAX_WAITS = 100
"""Values that a run waits for, of which its card tells."""


def workflow_run_card(run: WorkflowRun, *, in_list: bool = False) -> RunCard:
    """A run in the API's form; lists leave out the counts of nodes, and what runs wait for."""
    record = run.record
    waits = [] if in_list else [wait_card(wait) for wait in itertools.islice(run.waits.values(), MAX_WAITS)]
    counts, error = record.counts, record.error
    calls = counts.calls
    return RunCard(
        id=record.id,
        program=record.name,
        hash=record.workflow,
        kind="workflow",
        model=record.model,
        status=record.status,
        error=None if error is None else RunError(kind=error.kind, message=error.message, param=error.param),
        created=record.created_s,
        started=record.started_s,
        finished=record.finished_s,
        usage=RunUsage(
            prompt_tokens=calls.prompt_tokens,
            cached_tokens=calls.cached_tokens,
            generated_tokens=calls.output_tokens,
        ),
        workflow=WorkflowProgress(
            id=record.workflow,
            rows=record.num_rows,
            done=counts.rows,
            failed=counts.failed_rows,
            calls=_calls(calls),
            by_node={name: _calls(each) for name, each in counts.by_node.items() if not in_list},
            limits=WorkflowLimits(**record.spec.limits._asdict()),
            pins=PinCard(**counts.pins._asdict()),
            waits_for=waits,
            num_waits=len(run.waits),
        ),
    )


def wait_card(wait: RunWait, *, args: bool = False) -> VariableWait:
    """What a run waits for in the API's form."""
    return VariableWait(
        id=wait.id,
        row=wait.row,
        node=wait.node,
        since=wait.since_s,
        until=wait.until_s,
        schema=wait.schema,
        function=wait.function,
        args=wait.args if args else None,
    )


def started_card(start: CallStarted) -> StartedCall:
    """The start of a call in the API's form."""
    fields = start._asdict()
    return StartedCall(at=fields.pop("at_s"), **fields)


def results_page(page: Sequence[NumberedResult], record: WorkflowRunRecord, after: int) -> RowList:
    """Results in the API's form. They are stored in it, but for their numbers."""
    last = page[-1].number if page else after
    rows = [msgspec.Raw(numbered(number, result)) for number, result in page]
    return RowList(data=rows, last=last, has_more=last < record.counts.rows, status=record.status)  # type: ignore[arg-type]


def numbered(number: int, result: bytes) -> bytes:
    """The result of a row, a JSON object, with its number."""
    return b'{"number":%d,' % number + result[1:]


def _calls(counts: CallCounts) -> NodeCalls:
    return NodeCalls(**counts._asdict())
