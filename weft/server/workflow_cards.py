"""The forms of workflows' runs in the API: a record as a card, results as a page."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.programs.run.runs import RunUsage
from weft.server.schemas.programs import RunCard, RunError
from weft.server.schemas.workflows import NodeCalls, RowList, WorkflowLimits, WorkflowProgress
from weft.store.served_runs import NumberedResult
from weft.workflow.run.instructions import CallCounts
from weft.workflow.service.record import WorkflowRunRecord


def workflow_run_card(record: WorkflowRunRecord, *, with_nodes: bool = True) -> RunCard:
    """The record of a run in the API's form; lists leave the counts of nodes out."""
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
            by_node={name: _calls(each) for name, each in counts.by_node.items()} if with_nodes else {},
            limits=WorkflowLimits(**record.spec.limits._asdict()),
        ),
    )


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
