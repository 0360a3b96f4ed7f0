"""Weft's programs and workflows from Python, over HTTP: `Client`, and `AsyncClient` with the same methods to await.

from weft.client import Client

with Client("http://127.0.0.1:8000", api_key="…") as client:
    client.programs.upload("agent", "agent.py")
    run = client.programs.run("agent", {"question": "How are you?"})
    print(run.result)
"""

from weft.client.asynchronous import AsyncClient
from weft.client.errors import ClientError, RunFailedError, ServerError
from weft.client.synchronous import Client
from weft.client.values import LogEntry, Program, Run, RunEvent, Session, SessionPage
from weft.client.workflow_values import ResultPage, StoredGraph, WorkflowRunEvent

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "LogEntry",
    "Program",
    "ResultPage",
    "Run",
    "RunEvent",
    "RunFailedError",
    "ServerError",
    "Session",
    "SessionPage",
    "StoredGraph",
    "WorkflowRunEvent",
]
