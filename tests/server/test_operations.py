"""Metrics, traces, logs, documents, and the process as a whole."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from tests.server.conftest import RunningServer, ids, running, sse
from tests.server.test_disconnect import connect
from weft.abi.errors import ConfigError
from weft.config import ServerConfig
from weft.core.wire import EngineStats, Envelope, HistogramSnapshot, TraceSpan
from weft.endpoints.fields import ADVISORY, REFUSED
from weft.server.logs import JsonFormatter, TextFormatter
from weft.server.openapi import OPERATIONS, openapi
from weft.server.start import check_tls
from weft.version import __version__
from weft.workflow.graph import graph_schema


def samples(server: RunningServer) -> dict[tuple[str, str], float]:
    """By name and last label value that is not the model's name."""
    result = {}
    for family in text_string_to_metric_families(server.http().get("/metrics").text):
        for sample in family.samples:
            labels = [value for key, value in sorted(sample.labels.items()) if key != "model_name"]
            result[sample.name, ",".join(labels)] = sample.value
    return result


def test_metrics() -> None:
    with running() as server:
        server.on_loop(lambda: server.engine.script(ids("hello")))
        assert server.chat(max_tokens=20).status_code == 200
        assert server.chat(max_tokens=7, n=2, stream=True).status_code == 200
        assert server.chat(temperature=99).status_code == 400
        found = samples(server)
    assert found["weft:engine_up", ""] == 1
    assert found["weft:request_success_total", "stop"] == 1
    assert found["weft:request_success_total", "length"] == 2
    assert found["weft:generation_tokens_total", ""] == 6 + 14
    assert found["weft:time_to_first_token_seconds_count", ""] == 2
    assert found["weft:e2e_request_latency_seconds_count", ""] == 2
    assert found["weft:request_queue_time_seconds_count", ""] == 2
    # Every token but the first of each choice has one before it.
    assert found["weft:inter_token_latency_seconds_count", ""] == 5 + 12
    assert found["weft:request_prompt_tokens_sum", ""] == 42
    assert found["weft:request_generation_tokens_sum", ""] == 20
    assert found["weft:http_requests_total", "POST,/v1/chat/completions,200"] == 2
    assert found["weft:http_requests_total", "POST,/v1/chat/completions,400"] == 1
    wanted = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
    wanted += [f"{name}_total" for name in ("prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")]
    wanted += ["num_preemptions_total", "engine_step_device_seconds_total", "engine_steps_total"]
    assert {name for name, _ in found} >= {f"weft:{name}" for name in wanted}


def test_metrics_of_a_cost_profile(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [name for name, _ in samples(server) if "cost_model" in name or "saturation" in name]
    stats = EngineStats(
        cost_factor=1.5, saturation_tokens=77, cost_ratio=HistogramSnapshot((0.5, 1.0, 2.0), [1, 0, 3, 0], 5.0)
    )

    async def with_profile() -> EngineStats:
        return stats

    monkeypatch.setattr(server.engine, "stats", with_profile)
    found = samples(server)
    assert found["weft:cost_model_factor", ""] == 1.5
    assert found["weft:saturation_tokens", ""] == 77
    assert (found["weft:cost_model_ratio_count", ""], found["weft:cost_model_ratio_sum", ""]) == (4, 5.0)
    assert found["weft:cost_model_ratio_bucket", "1.0"] == 1


def test_metrics_of_waits(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = EngineStats(
        waste={"preserve": 5.0, "stalled": 1.5},
        wait_returns={"chat": {"kept": 3, "host": 2}, "http": {"recomputed": 1}},
        pages_given_up={"prefix": {"nowhere": 7}},
        retains_ended={"broken": 2, "expired": 4},
        objective_device_s={"latency": 2.5, "batch": 0.5},
        wait_ratio={"chat": HistogramSnapshot((0.5, 2.0), [1, 2, 0], 3.5)},
    )

    async def with_waits() -> EngineStats:
        return stats

    monkeypatch.setattr(server.engine, "stats", with_waits)
    found = samples(server)
    assert found["weft:kv_waste_token_seconds_total", "preserve"] == 5.0
    assert found["weft:kv_waste_token_seconds_total", "stalled"] == 1.5
    assert found["weft:engine_objective_device_seconds_total", "latency"] == 2.5
    assert found["weft:engine_objective_device_seconds_total", "batch"] == 0.5
    assert found["weft:kv_retains_ended_total", "broken"] == 2
    assert found["weft:kv_retains_ended_total", "expired"] == 4
    assert found["weft:wait_returns_total", "chat,host"] == 2
    assert found["weft:wait_returns_total", "http,recomputed"] == 1
    assert found["weft:kv_pages_given_up_total", "prefix,nowhere"] == 7
    assert (found["weft:wait_ratio_count", "chat"], found["weft:wait_ratio_sum", "chat"]) == (3, 3.5)
    assert found["weft:wait_ratio_bucket", "chat,0.5"] == 1


def test_metrics_of_an_engine_in_a_long_step(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def behind_the_step() -> EngineStats:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("weft.server.metrics_http.SCRAPE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(server.engine, "stats", behind_the_step)
    monkeypatch.setattr(server.engine, "latest_stats", EngineStats(prefill_tokens=7))
    monkeypatch.setattr(server.engine, "num_restarts", 2)
    found = samples(server)
    assert found["weft:engine_up", ""] == 1
    assert found["weft:engine_restarts_total", ""] == 2
    assert found["weft:prefill_tokens_total", ""] == 7


def test_metrics_of_failures(stepped: RunningServer) -> None:
    stepped.on_loop(lambda: stepped.engine.fail_next("out_of_pages"))
    connection = connect(stepped, "/v1/completions", {"prompt": "a", "n": 1})
    stepped.wait_until(lambda: bool(stepped.engine.sequences))
    stepped.on_loop(stepped.engine.step)
    assert b"503" in connection.recv(65536)
    stepped.on_loop(stepped.engine.die)
    found = samples(stepped)
    assert found["weft:request_success_total", "error"] == 1
    assert found["weft:engine_up", ""] == 0
    assert found["weft:http_requests_total", "POST,/v1/completions,503"] == 1


def test_paths_as_sent_make_no_labels(server: RunningServer) -> None:
    with server.http() as client:
        for number in range(5):
            client.get(f"/made-up/{number}")
            client.get(f"/v1/models/made-up-{number}")
            client.request(f"METHOD{number}", "/health")
    assert not [name for name in samples(server) if "made-up" in name[1] or "METHOD" in name[1]]


def test_traces() -> None:
    with running(auto=False, trace=True, api_keys=["alice=a", "bob=b"]) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
        connection = connect_as(server, body, "a", "r1")
        server.wait_until(lambda: bool(server.engine.sequences))
        request = server.on_loop(lambda: next(iter(server.engine.sequences.values())).request_id)
        span = TraceSpan(request, "scheduled", 1.5, 3)
        server.on_loop(lambda: server.engine._on_envelope(Envelope(1, [span])))
        server.on_loop(lambda: server.engine.step(5))
        assert b"200 OK" in connection.recv(65536)
        server.assert_nothing_left()
        trace = server.http().get("/v1/traces/r1", headers={"authorization": "Bearer a"}).json()
        assert trace["request_id"] == "r1"
        whats = [span["what"] for span in trace["spans"]]
        assert whats == ["received", "read", "tokenized", "first_token", "answered", "scheduled"]
        assert trace["spans"][-1] == {"what": "scheduled", "at_s": 1.5, "source": "engine", "detail": 3}
        same_id = {"authorization": "Bearer a", "x-request-id": "r1"}
        assert [server.http().get("/v1/traces/r1", headers=same_id).json() for _ in range(2)] == [trace, trace]
        other = server.http().get("/v1/traces/r1", headers={"authorization": "Bearer b"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "trace_not_found")


def connect_as(server: RunningServer, body: bytes, key: str, request_id: str):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {key}\r\nX-Request-Id: {request_id}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def test_tracing_is_off_by_default(server: RunningServer) -> None:
    answer = server.http().get("/v1/traces/x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "tracing_off")


def test_one_log_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    with running(api_keys=["alice=the-key"]) as server, caplog.at_level(logging.INFO, logger="weft.access"):
        headers = {"authorization": "Bearer the-key", "x-request-id": "id-1"}
        server.on_loop(lambda: server.engine.script(ids("the output")))
        body = {"prompt": "the prompt", "max_tokens": 20, "cache_salt": "the salt"}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
        server.http().get("/v1/nope%0aInjected: x?q=the-query")
        server.http().get("/health")
        server.assert_nothing_left()
    lines = [record for record in caplog.records if record.name == "weft.access"]
    assert len(lines) == 2
    fields = lines[0].weft
    assert fields["request_id"] == "id-1"
    assert (fields["method"], fields["path"], fields["status"]) == ("POST", "/v1/completions", 200)
    assert (fields["tenant"], fields["model"]) == ("alice", "fake-model")
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (10, 11)
    for formatter in (TextFormatter("%(message)s"), JsonFormatter()):
        text = "\n".join(formatter.format(record) for record in caplog.records)
        for secret in ("the prompt", "the output", "the-key", "the salt", "the-query"):
            assert secret not in text
        assert not re.search(r"^Injected", text, re.MULTILINE)
    assert json.loads(JsonFormatter().format(lines[0]))["status"] == 200


def test_values_cannot_break_a_text_line() -> None:
    record = logging.makeLogRecord({"msg": "request", "weft": {"path": "/a b\nc=d"}})
    assert TextFormatter("%(message)s").format(record) == r"request path='/a b\nc=d'"


def test_openapi_tells_every_route_and_no_other(server: RunningServer) -> None:
    routes = {
        (method, route.path.replace(":path", ""))
        for route in server.app.routes
        if isinstance(route, Route)  # OpenAPI has no word for a WebSocket
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert routes == {(op.method, op.path) for op in OPERATIONS}
    document = server.http().get("/openapi.json").json()
    assert document == json.loads(json.dumps(openapi()))
    OpenAPIV31SpecValidator(document).validate()
    assert document["info"]["version"] == __version__
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert told == routes


def test_openapi_refers_only_to_what_it_has() -> None:
    text = json.dumps(openapi())
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names == set(openapi()["components"]["schemas"])
    for op in OPERATIONS:
        if op.request is not None:
            schema = openapi()["components"]["schemas"][op.request.__name__]
            others = set(ADVISORY) | set(REFUSED.get(op.request, {}))
            assert set(schema["properties"]) == set(op.request.__struct_fields__) | others
            assert schema["additionalProperties"] is False


def test_openapi_has_the_schema_of_graphs() -> None:
    schemas = openapi()["components"]["schemas"]
    assert schemas["WorkflowUpload"]["properties"]["graph"]["$ref"] == "#/components/schemas/WorkflowGraph"
    standalone = json.dumps(graph_schema()["$defs"]["MapNode"])
    assert json.loads(standalone.replace("#/$defs/", "#/components/schemas/")) == schemas["MapNode"]


@pytest.mark.parametrize("accept", ["text/html,application/xhtml+xml,*/*;q=0.8", "*/*"])
@pytest.mark.parametrize("api_keys", [[], ["alice=a-key"]])
def test_what_is_told_without_a_key(accept: str, api_keys: list[str]) -> None:
    with running(api_keys=api_keys, names=["the-model"]) as server, server.http(headers={"accept": accept}) as client:
        start, docs, document = (client.get(path) for path in ("/", "/docs", "/openapi.json"))
        assert [answer.status_code for answer in (start, docs, document)] == [200, 200, 200]
        assert start.headers["content-type"].partition(";")[0] == ("text/html" if "html" in accept else "text/plain")
        text = html.unescape(start.text)
        assert "/docs" in text
        assert ("the-model" in text) == (not api_keys)
        assert ("Authorization: Bearer <key>" in text) == bool(api_keys)
        assert ("Authorization: Bearer <key>" in html.unescape(docs.text)) == bool(api_keys)
        # The command works as it is written, for who has a key.
        [command] = re.findall(r"curl .*'(?=</code>|\n$)", text, re.S)
        words = shlex.split(command.replace("<key>", "a-key"))
        headers = dict(word.split(": ", 1) for word in words if re.match(r"[A-Z][\w-]+: ", word))
        assert httpx.post(words[1], headers=headers, content=words[words.index("-d") + 1]).status_code == 200
        secured = [op for path in document.json()["paths"].values() for op in path.values() if op.get("security")]
        assert bool(secured) == bool(api_keys)
        assert ("securitySchemes" in document.json()["components"]) == bool(api_keys)
        OpenAPIV31SpecValidator(document.json()).validate()


def test_answers_have_the_shape_that_openapi_tells(server: RunningServer) -> None:
    schemas = openapi()["components"]["schemas"]

    def fits(value: object, name: str) -> None:
        schema = schemas[name]
        assert isinstance(value, dict)
        assert set(value) <= set(schema["properties"]), name
        assert set(schema.get("required", ())) <= set(value), name

    answer = server.chat(logprobs=True, return_token_ids=True, prompt_logprobs=0).json()
    fits(answer, "ChatResponse")
    fits(answer["choices"][0], "ChatChoice")
    fits(answer["usage"], "UsageInfo")
    fits(server.chat(temperature=-1).json(), "ErrorResponse")
    fits(server.http().get("/v1/models").json(), "ModelList")
    fits(server.post("/tokenize", {"prompt": "a"}).json(), "TokenizeResponse")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_loads_nothing(server: RunningServer) -> None:
    answer = server.http().get("/docs")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = _Page()
    page.feed(answer.text)
    assert page.links == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    for op in OPERATIONS:
        assert f"{op.method} {op.path}" in page.text
    assert "truncate_prompt_tokens" in page.text


PROGRAM = """
import sys
from weft.config import ServerConfig
from weft.server.app import create_app
from weft.server.logs import configure_logging
from weft.server.run import Server
from weft.endpoints.models import ServedModel
from weft.server.state import Service
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine

class Told(Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

config = ServerConfig(port=0, drain_s=60, log_format="json")
configure_logging(config)
engine = FakeEngine()
Told(create_app(config, Service(config, [ServedModel(["m"], engine, byte_tokenizer())])), config).run()
print("closed" if engine.closed else "left open", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_in_order(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"}).status_code == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert out == "closed\n"
    lines = [json.loads(line) for line in err.splitlines()]
    assert any(line.get("path") == "/v1/completions" and line["status"] == 200 for line in lines)
    assert any("draining" in line["message"] for line in lines)


def test_tls(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    make = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([openssl, *make, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    check_tls(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    with running(ssl_certfile=cert, ssl_keyfile=key) as server:
        trust = ssl.create_default_context(cafile=cert)
        answer = httpx.get(f"https://127.0.0.1:{server.port}/v1/models", verify=trust)
        assert answer.status_code == 200
    for wrong in ((cert, None), (None, key), (cert, str(tmp_path / "none")), (key, cert)):
        with pytest.raises(ConfigError, match="ssl_certfile"):
            check_tls(ServerConfig(ssl_certfile=wrong[0], ssl_keyfile=wrong[1]))


def test_long_prompts_with_details_are_written_off_the_loop(server: RunningServer) -> None:
    prompt = "a" * 3000
    body = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1, "seed": 1}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    assert whole["text"].startswith(prompt)
    assert len(whole["logprobs"]["tokens"]) == 3002
    events = sse(server.post("/v1/completions", body | {"stream": True}).text)[:-1]
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 3002
