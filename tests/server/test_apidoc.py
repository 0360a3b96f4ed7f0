"""`docs/api.md` says what the code does."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.server.conftest import running
from weft.config import ServerConfig
from weft.core import sampling
from weft.endpoints import constraints, generate, tools
from weft.endpoints.errors import _MEANINGS
from weft.endpoints.fields import ADVISORY, REFUSED
from weft.endpoints.schemas.common import MAX_CHOICES
from weft.endpoints.schemas.embedding import MAX_INPUTS
from weft.programs.quota.limits import Limits
from weft.programs.run import runs
from weft.sdk.beam_rules import MAX_WIDTH
from weft.server import limits, metrics_http, protocol
from weft.server.apidoc import filled, tables
from weft.server.openapi import OPERATIONS

Parse = Callable[[str], Iterable[Metric]]
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""What a Prometheus 3 sends for names without UTF-8."""
PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code() -> None:
    assert filled(PAGE) == PAGE, "run: python -m weft.server.apidoc docs/api.md"
    with pytest.raises(ValueError, match="needs one `<!-- table: NAME -->`"):
        filled("no markers")
    with pytest.raises(ValueError, match="advisory"):
        filled(PAGE.replace("table: advisory", "table: other"))


def test_a_field_is_one_thing() -> None:
    for kind, refused in REFUSED.items():
        known = set(kind.__struct_fields__)
        assert not known & set(refused)
        assert not known & set(ADVISORY)
        assert not set(refused) & set(ADVISORY)


def test_every_operation_and_code_is_told() -> None:
    for op in OPERATIONS:
        assert f"{op.method} {op.path}".replace("{model}", "{id}").replace("{request_id}", "{request id}") in PAGE
    for meaning in _MEANINGS.values():
        assert meaning.code is None or f"`{meaning.code}`" in PAGE


def test_limits_of_runs_are_those_of_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\S+|not set) \| .+ \|$", PAGE.split("### Limits of a run")[1].split("\n### ")[0], re.M
    )
    defaults = {name: getattr(Limits(), name) for name in Limits.__struct_fields__}
    told = {name: "not set" if value is None else f"`{json.dumps(value)}`" for name, value in defaults.items()}
    assert dict(rows) == told
    assert f"the last {runs.KEPT_MESSAGES} or {runs.KEPT_MESSAGE_BYTES >> 20} MiB" in PAGE
    assert f"the last {runs.KEPT_LOG_BYTES >> 10} KiB" in PAGE


def test_the_example_of_programs_runs() -> None:
    [example] = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "weft.client" in text]
    with running() as server, contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(example.replace("http://localhost:8000", server.url), "api.md", "exec"), {})
    assert out.getvalue() == "6\n"


def test_the_example_of_beams_runs() -> None:
    [example] = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "use_beam_search" in text]
    with running(names=["weft-tiny"]) as server, contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(example, "api.md", "exec"), {"client": server.openai()})
    scores = [float(line.partition(" ")[0]) for line in out.getvalue().splitlines() if line.startswith("-")]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("accept", "content_type", "parse"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8", parse_text),
        ("text/plain;version=1.0.0;escaping=underscores", "text/plain; version=0.0.4; charset=utf-8", parse_text),
        (PROMETHEUS_3, "application/openmetrics-text; version=1.0.0; charset=utf-8", parse_openmetrics),
        (
            "application/openmetrics-text",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            parse_openmetrics,
        ),
    ],
)
def test_the_metrics_are_those_of_the_code(accept: str, content_type: str, parse: Parse) -> None:
    with running() as server:
        server.chat()
        answer = server.http().get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == content_type
    families = [family for family in parse(answer.text) if family.name.startswith("weft")]
    # Both parsers name a counter's family without the `_total` of its samples.
    names = [family.name + "_total" * (family.type == "counter") for family in families]
    told = re.findall(r"^\| `(weft:\w+)` \| (\w+) \| (.+) \|$", PAGE, re.M)
    assert told == [(name, family.type, family.documentation) for name, family in zip(names, families, strict=True)]
    assert len(told) > 40
    for name, family in zip(names, families, strict=True):
        suffixes = ("_bucket", "_count", "_sum") if family.type == "histogram" else ("",)
        assert {sample.name for sample in family.samples} <= {name + suffix for suffix in suffixes}
    assert any(sample.name == "weft:request_success_total" for family in families for sample in family.samples)
    assert f"within {metrics_http.SCRAPE_TIMEOUT_S:g} seconds" in " ".join(PAGE.split())


def test_limits_are_those_of_the_code() -> None:
    defaults = ServerConfig()
    rows = [
        ("body", f"`max_body_bytes`, {defaults.max_body_bytes // 2**20} MiB; counted while it arrives"),
        (
            "bodies of all requests at once",
            f"`max_bodies_bytes`, {defaults.max_bodies_bytes // 2**20} MiB; half of it per tenant if keys name "
            "several; then 429",
        ),
        (
            "request line and headers",
            f"{protocol.MAX_HEAD_BYTES // 1024} KiB; `header_timeout_s`, {defaults.header_timeout_s:g} seconds",
        ),
        (
            "concurrent requests",
            f"`max_concurrent_requests`, {defaults.max_concurrent_requests}; half of it per tenant if keys name "
            "several; then 429, with the time until a place is expected to be free in `Retry-After`",
        ),
        (
            "connections",
            f"`max_connections`, {defaults.max_connections}; then the one that waits longest for a request is closed",
        ),
        ("a client that does not read its answer", f"`send_timeout_s`, {defaults.send_timeout_s:g} seconds"),
        ("`n`; prompts times `n`", str(MAX_CHOICES)),
        ("beams of a search; prompts times beams", f"{MAX_WIDTH}; {MAX_CHOICES}"),
        ("inputs of one embedding request", str(MAX_INPUTS)),
        ("prompts or inputs of one request that run at once", str(generate.PROMPTS_AT_ONCE)),
        ("`stop`", f"{sampling.MAX_STOP_STRINGS} strings of up to {sampling.MAX_STOP_BYTES} bytes"),
        ("`logit_bias`", f"{sampling.MAX_LOGIT_BIAS} entries"),
        (
            "`bad_words`",
            f"{sampling.MAX_BAD_WORDS // 2}, with {sampling.MAX_BAD_WORD_TOKENS} tokens together, those of each word "
            "at the beginning of a text and after a space",
        ),
        ("`tools`", str(tools.MAX_TOOLS)),
        ("schemas and grammars of a request", f"{constraints.MAX_GRAMMAR_BYTES >> 10} KiB"),
        (
            "strings of `guided_choice`",
            f"{constraints.MAX_CHOICE_STRINGS:,}, with {constraints.MAX_CHOICE_BYTES >> 20} MiB together",
        ),
        ("`logprobs`, `top_logprobs`, `prompt_logprobs`", str(sampling.MAX_LOGPROBS)),
    ]
    for row in rows:
        assert "| {} | {} |".format(*row) in PAGE
    stopped = f"the body stopped coming for `body_timeout_s` ({defaults.body_timeout_s:g}) seconds"
    assert f"{stopped}, or came with less than {limits.MIN_BODY_RATE} bytes a second" in PAGE


def test_every_field_has_a_meaning() -> None:
    rows = [line for table in tables().values() for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) in (2, 3, 4), row
        assert all(cells), row
