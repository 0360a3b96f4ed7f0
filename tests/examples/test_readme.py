"""The README as it stands, on the model that it names: blocks run, commands run, prompts get answers that end."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import weft
from tests.examples.help import Lab
from weft.cli.bench.server import own_server
from weft.cli.main import app
from weft.cli.settings import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CLI_PAGE = (ROOT / "docs" / "cli.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROGRAMS = [block for block in BLOCKS if "async def main" in block]
CLIENTS = [block for block in BLOCKS if ADDRESS in block]
FLOWS = [block for block in BLOCKS if "weft.flow" in block]
OFFLINE = [block for block in BLOCKS if "weft.LLM" in block and block not in FLOWS]
COMMANDS = [
    shlex.split(line.removeprefix("$ .venv/bin/"), comments=True)
    for line in README.replace("\\\n", "").splitlines()
    if line.startswith("$ .venv/bin/weft ")
]
CURLS = [
    shlex.split(line.removeprefix("$ "), comments=True)
    for line in README.replace("\\\n", "").splitlines()
    if line.startswith("$ curl ")
]
ARGS = {"question": "What is the weather in Rome?"}
QUESTIONS = sorted(
    {
        *re.findall(r'"content": "([^"{]+)"', README),
        *re.findall(r"weft generate --chat ['\"]([^'\"]+)['\"]", README + CLI_PAGE),
        *re.findall(r"echo '([^']+)' \| weft generate --chat", CLI_PAGE),
    }
)
"""What the README and the page of the command line ask the model without giving it tools."""


def ends_sensibly(text: str) -> bool:
    """Whether a text is JSON, or sentences of words: ended, none of them repeated."""
    if text.startswith("{"):
        return isinstance(json.loads(text), dict)
    sentences = re.findall(r"[^.!?]+[.!?]", text)
    return (
        "".join(sentences) == text
        and len(text.split()) >= 3
        and len(set(sentences)) == len(sentences)
        and re.fullmatch(r"[\w\s.,!?'-]+", text) is not None
    )


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with own_server(load()) as url:
        yield url


def test_every_block_and_command_is_tried_below() -> None:
    assert len(PROGRAMS) + len(CLIENTS) + len(FLOWS) + len(OFFLINE) == len(BLOCKS) == 5
    assert {command[1] for command in COMMANDS} == {"chat", "serve", "run", "programs", "generate", "doctor"}
    assert len(CURLS) == 1


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("block", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_answer(lab: Lab, block: str, trusted: bool) -> None:
    result, _ = lab.source(block, "example", ARGS, trusted=trusted)
    assert "21 degrees" in result if "weather" in block else re.fullmatch(r"[\w ,.!?'-]{8,}", result), result


@pytest.mark.parametrize("block", CLIENTS)
def test_clients_run(server: str, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block.replace(ADDRESS, server), {})
    assert ends_sensibly(capsys.readouterr().out)


@pytest.mark.parametrize("block", OFFLINE)
def test_offline_use_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block, {})
    *people, joke = capsys.readouterr().out.splitlines()
    assert [json.loads(person) for person in people] == [{"name": "Ada", "age": 36}, {"name": "Nora", "age": 34}]
    assert ends_sensibly(joke)


@pytest.mark.parametrize("block", FLOWS)
def test_flows_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block, {})
    ada, nora, counts = capsys.readouterr().out.splitlines()
    assert ada.startswith("Ada, 36: ")
    assert nora.startswith("Nora, 34: ")
    assert ends_sensibly(ada.removeprefix("Ada, 36: "))
    assert "calls=3, merged_calls=1" in counts


def test_commands_run(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [agent] = [block for block in PROGRAMS if block.startswith("# agent.py")]
    (tmp_path / "agent.py").write_text(agent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    for command in COMMANDS:
        if command[1] in ("run", "generate", "programs"):
            local = command[1] != "programs"
            monkeypatch.delenv("WEFT_URL", raising=False) if local else monkeypatch.setenv("WEFT_URL", server)
            result = CliRunner().invoke(app, command[1:], prog_name="weft")
            assert result.exit_code == 0, result.output
            if "agent" in command or command[1] == "run":
                assert "21 degrees" in result.stdout
            elif local:
                assert ends_sensibly(result.stdout.strip()), result.stdout


def test_curl_is_answered(server: str) -> None:
    for command in CURLS:
        [address] = [word for word in command if word.startswith(ADDRESS)]
        body = json.loads(command[command.index("-d") + 1])
        [choice] = httpx.post(address.replace(ADDRESS, server), json=body, timeout=None).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert ends_sensibly(choice["message"]["content"])


def test_answers_to_the_questions_end_by_themselves() -> None:
    assert len(QUESTIONS) >= 4
    with weft.LLM("weft-tiny") as llm:
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for result, question in zip(llm.chat(asked, temperature=0), QUESTIONS, strict=True):
            assert result.finish_reason == "stop", question
            assert ends_sensibly(result.text), (question, result.text)
