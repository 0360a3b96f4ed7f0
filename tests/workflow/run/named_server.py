"""A server with OpenAI's API of which nothing is known but the name of its model, which may change."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class NamedServer(ThreadingHTTPServer):
    """Answers each call with the name of the model that it is for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = "one"
        self.num_listed = 0
        """Times that it was asked for its models."""
        self.num_calls = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: NamedServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.num_listed += 1
        self._send({"data": [{"id": self.server.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.num_calls += 1
        choice = {"index": 0, "delta": {"content": f"{body['model']} says"}, "finish_reason": "stop"}
        event = json.dumps({"choices": [choice]}).encode()
        self._reply(b"data: " + event + b"\n\ndata: [DONE]\n\n", "text/event-stream")

    def _send(self, body: Any) -> None:
        self._reply(json.dumps(body).encode(), "application/json")

    def _reply(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def named_server() -> Iterator[NamedServer]:
    """A server that answers until the end of the block."""
    with NamedServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
