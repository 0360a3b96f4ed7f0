"""Requests made from the OpenAPI document: none is the server's fault, and every answer has the shape it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.server.conftest import RunningServer, running
from weft.server.openapi import OPERATIONS, Operation

CHECKS = [not_a_server_error, response_schema_conformance, status_code_conformance]
IDS = [f"{op.method} {op.path}" for op in OPERATIONS]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server
        server.assert_nothing_left()


@pytest.fixture(scope="module")
def document(server: RunningServer) -> BaseSchema:
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


def fuzz(server: RunningServer, document: BaseSchema, op: Operation, num_requests: int) -> None:
    statuses = set()

    @settings(
        max_examples=num_requests,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=document[op.path][op.method].as_strategy())
    def send(case: schemathesis.Case) -> None:
        fit(case)
        response = case.call(base_url=server.url, timeout=60)
        case.validate_response(response, checks=CHECKS)
        statuses.add(response.status_code)

    send()
    if op.path in ("/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/runs"):
        assert 200 in statuses, "no request was valid: the document says less than the server asks for"


def fit(case: schemathesis.Case) -> None:
    """What a schema cannot say: names of this server, and fields of which there is one."""
    if isinstance(case.body, dict):
        case.body.pop("model", None)
        if "program" in case.body:
            case.body = {"source": "def main(args): return args", "args": case.body.get("args")}
        if "prompt" in case.body and "tools" in case.body:
            case.body = {"prompt": case.body["prompt"]}


@pytest.mark.parametrize("op", OPERATIONS, ids=IDS)
def test_valid_requests(server: RunningServer, document: BaseSchema, op: Operation) -> None:
    fuzz(server, document, op, num_requests=15)


@pytest.mark.soak
@pytest.mark.parametrize("op", OPERATIONS, ids=IDS)
def test_many_valid_requests(server: RunningServer, document: BaseSchema, op: Operation) -> None:
    fuzz(server, document, op, num_requests=500)
