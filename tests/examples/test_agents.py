"""Agents solve their tasks with real tools: a calculator, the store, a web server, the sandbox, each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.examples.help import Lab


class Weather(BaseHTTPRequestHandler):
    """Knows two towns."""

    asked: list[str] = []  # noqa: RUF012
    towns = {"Lund": "rainy, 7 degrees", "Oslo": "sunny, 21 degrees"}  # noqa: RUF012

    def do_GET(self) -> None:
        city = parse_qs(urlsplit(self.path).query)["city"][0]
        self.asked.append(city)
        body = self.towns.get(city, "").encode()
        self.send_response(200 if body else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """host:port of a weather service."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Weather)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("key", "value", "factor"), [("rate_kolm", 58, 12), ("size_brug", 31, 14), ("limit_tamm", 64, 25)]
)
def test_react_chains_the_store_and_the_calculator(lab: Lab, key: str, value: int, factor: int) -> None:
    question = f"What is the value of {key} times {factor}?"
    result, messages = lab.told("agent_react", {"question": question, "table": {key: value}})
    product = f"{value * factor}"
    assert result["steps"] == [
        ["lookup", {"key": key}, str(value)],
        ["calculator", {"expression": f"{value} * {factor}"}, product],
    ]
    assert messages == result["steps"]
    assert result["answer"] == f"{value} * {factor} = {product}."


@pytest.mark.parametrize("trusted", [True, False])
def test_react_asks_the_web(lab: Lab, address: str, trusted: bool) -> None:
    lab.allow(address)
    args = {"question": "What is the weather in Lund?", "weather_url": f"http://{address}/now"}
    Weather.asked.clear()
    result = lab.example("agent_react", args, network=[address], trusted=trusted)
    assert result["steps"] == [["weather", {"city": "Lund"}, "rainy, 7 degrees"]]
    assert result["answer"] == "The weather in Lund is rainy, 7 degrees."
    assert Weather.asked == ["Lund"]


def test_react_is_told_that_it_may_not_reach_a_host(lab: Lab, address: str) -> None:
    """The run's own list is empty: the model gets the refusal as the tool's result, and no request is sent."""
    asked = len(Weather.asked)
    lab.allow(address)
    source = lab.text("agent_react").replace("async def main(args):", "async def agent(args):") + (
        "\n\nasync def main(args):\n    from weft.sdk.toolbox import ToolCall\n"
        "    call = ToolCall('1', 'weather', '{\"city\": \"Lund\"}')\n    return await execute(call, [weather])\n"
    )
    assert "allow-list" in lab.source(source, args={"weather_url": f"http://{address}/now"})[0]
    assert len(Weather.asked) == asked


def test_react_goes_on_after_a_tool_s_failure(lab: Lab) -> None:
    """A key that is not there is no reason to end."""
    result = lab.example("agent_react", {"question": "What is stored under rate_kolm?", "table": {"rate_kolm": "K-81"}})
    assert result["steps"] == [["lookup", {"key": "rate_kolm"}, "K-81"]]
    assert "K-81" in result["answer"]


def test_swarm_adds_up_what_its_workers_solve(lab: Lab) -> None:
    result = lab.example("agent_swarm")
    assert [solved["value"] for solved in result["solved"]] == [14 * 23, 31 * 17, 12 * 19, 21 * 13]
    assert result["total"] == 14 * 23 + 31 * 17 + 12 * 19 + 21 * 13
    assert [solved["by"] for solved in result["solved"]] == ["worker0", "worker1", "worker2", "worker0"]
    assert sum(result["counts"].values()) == 4 + 3


def test_swarm_of_programs(lab: Lab) -> None:
    """The same with workers that are programs of their own."""
    result = lab.example("agent_swarm", {"program": "agent_swarm", "workers": 2})
    assert result["total"] == 14 * 23 + 31 * 17 + 12 * 19 + 21 * 13
    assert set(result["counts"]) == {"worker0", "worker1"}
    runs = [run for run in lab.host.history.runs("t") if run.record().parent]
    assert len(runs) == 2


def test_two_swarms_do_not_hear_each_other(lab: Lab) -> None:
    async def both() -> list[object]:
        import asyncio

        source = lab.text("agent_swarm")
        runs = [lab.launch(source, "swarm", {"problems": [problem]}) for problem in PROBLEMS]
        outcomes = await asyncio.gather(*(lab.outcome(run) for run in runs))
        return [result["total"] for result, _ in outcomes]

    assert lab.runner.run(both()) == [27 * 14, 19 * 18]


PROBLEMS = [
    "A shelf holds 27 books. How many books do 14 shelves hold?",
    "I walk 19 miles each day for 18 days. How far is that?",
]


@pytest.mark.parametrize(
    ("question", "code", "value"),
    [
        ("There are 14 boxes with 23 pens each. How many are there in all?", "14 * 23", "322"),
        ("What is 512 plus 88?", "512 + 88", "600"),
    ],
)
def test_codeact_runs_its_code_in_the_sandbox(lab: Lab, question: str, code: str, value: str) -> None:
    result = lab.example("agent_codeact", {"question": question})
    assert result["steps"] == [[f'{{"expression": "{code}"}}', value]]
    assert result["answer"] == f"{code} = {value}."


def test_code_that_fails_or_spins_is_told_and_harms_nobody(lab: Lab) -> None:
    """What the model writes is not to be trusted: the same function, given worse code."""
    source = lab.text("agent_codeact").replace("async def main(args):", "async def agent(args):") + (
        "\n\nasync def main(args):\n    return [await run(code, 0.3) for code in args]\n"
    )
    connect = "__import__('socket').create_connection(('127.0.0.1', 1))"
    codes = ["1 / 0", "6 * 7", "[x for x in iter(int, 1) if x]", connect, ")"]
    results = lab.source(source, args=codes)[0]
    assert results[1] == "42"
    assert "ZeroDivisionError" in results[0]
    assert all(result.startswith("Error: ") for at, result in enumerate(results) if at != 1)
    assert "more than 0.3 s" in results[2]
