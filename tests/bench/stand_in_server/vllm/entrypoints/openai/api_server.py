"""Stands in for vLLM's server: answers every path with its arguments and the variables that were set for it."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

ARGUMENTS = sys.argv[1:]
VARIABLES = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"arguments": ARGUMENTS, "variables": VARIABLES}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    if ARGUMENTS[ARGUMENTS.index("--model") + 1] == "missing":
        sys.exit("no such checkpoint")
    HTTPServer(("127.0.0.1", int(ARGUMENTS[ARGUMENTS.index("--port") + 1])), Handler).serve_forever()
