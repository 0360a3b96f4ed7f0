"""`weft workflow` on the embedded model and on a server."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from tests.server.conftest import running
from weft.cli.workflow_remote import MAX_WAITS
from weft.core.wire import Open
from weft.workflow.actuals import RunCounts
from weft.workflow.api import GraphRun
from weft.workflow.bars import bars
from weft.workflow.graph import graph_schema

SMALL = ("--num-pages", "256", "--max-running", "8")
FLOW = """
import weft
from weft import ops
from beside import shout

@weft.flow
def tell(topic):
    first = ops.llm(f"Tell me about {topic}.", max_tokens=4, temperature=0)
    return {"text": first, "loud": ops.function(shout, topic)}
"""
BESIDE = "def shout(text):\n    return text.upper()\n"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text(BESIDE)
    path = tmp_path / "flow.py"
    path.write_text(FLOW)
    return path


def lines(text):
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda line: line["row"])


def test_a_table_from_a_file(weft, file, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("topic,unused\nthe sea,1\nthe moon,2\n")
    out = tmp_path / "out.jsonl"
    result = weft("workflow", "run", str(file), "--rows", str(rows), "-o", str(out), *SMALL)
    assert result.exit_code == 0, result.stderr
    found = lines(out.read_text())
    assert [line["outputs"]["loud"] for line in found] == ["THE SEA", "THE MOON"]
    assert "2 rows in" in result.stderr
    assert "2 calls; " in result.stderr


def test_one_row_and_a_flow_by_its_name(weft, file):
    result = weft("workflow", "run", f"{file}:tell", "--row", "topic=the sea", "--quiet", *SMALL)
    assert result.exit_code == 0, result.stderr
    assert lines(result.stdout)[0]["outputs"]["loud"] == "THE SEA"
    assert result.stderr == ""


LATE = """
import weft
from weft import ops

def shout(text):
    from beside_a_late_flow import shout as found
    return found(text)

@weft.flow
def tell(topic):
    return ops.function(shout, topic)
"""


def test_functions_import_what_is_beside_their_file(weft, tmp_path):
    (tmp_path / "beside_a_late_flow.py").write_text(BESIDE)
    (tmp_path / "late.py").write_text(LATE)
    result = weft("workflow", "run", str(tmp_path / "late.py"), "--row", "topic=the sea", "--on", "http://127.0.0.1:9")
    assert result.exit_code == 0, result.stderr
    assert lines(result.stdout)[0]["outputs"]["value"] == "THE SEA"


def test_the_server_of_the_environment_runs_the_graph_unless_on_is_given(weft, file, monkeypatch):
    row = ("workflow", "run", str(file), "--row", "topic=the sea")
    with running() as server:
        monkeypatch.setenv("WEFT_URL", server.url)
        assert weft(*row).exit_code == 0
        assert len(weft("workflow", "list").stdout.splitlines()) == 1 + 1
        monkeypatch.setenv("WEFT_URL", "http://127.0.0.1:9")
        assert weft(*row).exit_code == 1
        assert weft(*row, "--on", server.url).exit_code == 0
        assert weft(*row, "--url", server.url).exit_code == 0


def test_json_is_a_workflow_too_and_runs_on_a_server(weft, file, tmp_path):
    shown = weft("workflow", "show", str(file), "--json")
    graph = json.loads(shown.stdout)
    graph["nodes"] = [node for node in graph["nodes"] if node["op"] == "llm"]
    graph["outputs"] = {"text": "llm_1"}
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph))
    with running() as server:
        result = weft("workflow", "run", str(path), "--row", "topic=the sea", "--on", server.url)
        assert result.exit_code == 0, result.stderr
        assert lines(result.stdout)[0]["outputs"]["text"]


def test_rows_that_fail_are_told_and_counted(weft, file):
    result = weft("workflow", "run", str(file), "--row", "topic=3", *SMALL)
    assert result.exit_code == 1
    assert "row 0 failed at function_1: 'int' object has no attribute 'upper'" in result.stderr
    assert lines(result.stdout)[0]["error"]["kind"] == "AttributeError"


def test_a_limit_is_kept(weft, file):
    result = weft("workflow", "run", str(file), "--row", "topic=x", "--max-calls", "0", *SMALL)
    assert result.exit_code == 1
    assert "the run has made the 0 calls that it may make" in result.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_seconds_are_above_0(weft, file, seconds):
    result = weft("workflow", "run", str(file), "--row", "topic=x", f"--max-seconds={seconds}", *SMALL)
    assert result.exit_code == 2
    assert "--max-seconds takes a number above 0" in result.stderr


def test_a_limit_of_seconds_is_kept(weft, file):
    result = weft("workflow", "run", str(file), "--row", "topic=x", "--max-seconds", "1e-9", *SMALL)
    assert result.exit_code == 1
    assert "the run has taken the 1e-09 seconds that it may take" in result.stderr


def test_the_schema_is_written(weft):
    assert json.loads(weft("workflow", "schema").output) == graph_schema()


def test_show_is_an_outline(weft, file):
    shown = weft("workflow", "show", str(file))
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[0] == "inputs: topic"
    assert "llm_1" in shown.stdout
    assert "outputs: text = llm_1, loud = function_1" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "FILE"), "give either --rows FILE or --row"),
        (("run", "FILE", "--row", "topic=x", "--rows", "y"), "give either --rows FILE or --row"),
        (("run", "FILE", "--row", "topic"), "write NAME=VALUE"),
        (("run", "FILE", "--row", "subject=x"), "topic"),
        (("run", "FILE", "--row", "topic=x", "--row", "topic=y"), "--row gives topic twice"),
        (("run", "FILE", "--row", "topic=x", "--on", "http://h", "--url", "http://h"), "either --on or --url"),
        (("run", "FILE", "--row", "topic=x", "--on", "weft-tiny"), "'weft-tiny', which is no address"),
        (("run", "FILE", "--row", "topic=x", "--on", "http://h", "-o", "FOLDER"), "is a folder: name a file in it"),
        (("run", "FILE", "--rows", "ROWS", "--on", "http://h", "-o", "ROWS"), "is the file of the rows"),
        (("run", "FILE", "--row", "topic=x", "--on", "http://h", "--num-pages", "9"), "configures an engine"),
        (("run", "FILE:other", "--row", "topic=x"), "has no flow 'other'; it has tell"),
        (("show", "missing.py"), "missing.py cannot be read"),
        (("show", "missing.json"), "missing.json cannot be read"),
        (("show", "BESIDE"), "has no flow"),
        (("show", "BROKEN"), "broken.py:1: the file cannot be executed: ZeroDivisionError"),
        (("show", "NOTJSON"), "not JSON"),
    ],
)
def test_mistakes_are_one_line(weft, file, tmp_path, arguments, message):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "not.json").write_text("{")
    names = {"FILE": file, "FILE:other": f"{file}:other", "BESIDE": tmp_path / "beside.py"}
    names |= {"BROKEN": tmp_path / "broken.py", "NOTJSON": tmp_path / "not.json"}
    names |= {"FOLDER": tmp_path, "ROWS": tmp_path / "rows.jsonl"}
    names["ROWS"].write_text('{"topic": "x"}\n')
    result = weft("workflow", *(str(names.get(word, word)) for word in arguments))
    assert result.exit_code in (1, 2)
    assert names["ROWS"].read_text() == '{"topic": "x"}\n'
    assert not [*tmp_path.rglob("*.run"), *tmp_path.parent.glob(f"{tmp_path.name}.run")]
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("command", [("show",), ("run", "--row", "topic=x"), ("explain", "--rows", "3")])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('if ops.llm(topic) == "yes":', "flow.py:6: this needs a comparison of a value"),
        ('if ops.join("text", topic):', "flow.py:6: ops.join takes a list"),
        ("if undefined:", "flow.py:6: the flow tell cannot be executed: NameError"),
    ],
)
def test_mistakes_in_a_flow_are_one_line_that_names_theirs(weft, tmp_path, command, line, message):
    path = tmp_path / "flow.py"
    head = "import weft\nfrom weft import ops\n\n@weft.flow\ndef tell(topic):"
    path.write_text(f"{head}\n    {line}\n        pass\n    return topic\n")
    result = weft("workflow", command[0], str(path), *command[1:])
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_explain_shows_the_plan_without_a_model(weft, file, tmp_path):
    statistics = tmp_path / "statistics.json"
    statistics.write_text('{"llm_1": {"output_tokens": 3}, "topic": {"output_tokens": 9}}')
    result = weft("workflow", "explain", str(file), "--rows", "20", "--statistics", str(statistics))
    assert result.exit_code == 0, result.stderr
    assert "rows 0-19: llm_1" in result.stdout
    assert "computes " in result.stdout
    (engines := tmp_path / "engines.json").write_text('[{"model": "weft-tiny", "kv_tokens": 512}]')
    arguments = (str(file), "--rows", "20", "--engines", str(engines))
    made = json.loads(weft("workflow", "explain", *arguments, "--json").stdout)
    assert made["predicted"]["calls"] == 20
    assert weft("workflow", "explain", *arguments, "--mermaid").stdout.startswith("flowchart TD\n")


def test_explain_refuses_statistics_that_cannot_be_true(weft, file, tmp_path):
    (statistics := tmp_path / "statistics.json").write_text('{"topic": {"output_tokens": NaN}, "llm_1": {"items": -1}}')
    result = weft("workflow", "explain", str(file), "--rows", "20", "--statistics", str(statistics))
    assert result.exit_code == 1
    assert "topic.output_tokens: is nan; a number from 0" in result.stderr
    assert "llm_1.items: is -1; a number from 0" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json", "--mermaid"), "one of --json"),
        (("--statistics", "nowhere.json"), "nowhere.json"),
        (("--engines", "FLOW"), "no JSON"),
        (("--model", "no/such-model-here"), "no/such-model-here"),
    ],
)
def test_explain_says_what_is_wrong(weft, file, arguments, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = [str(file) if word == "FLOW" else word for word in arguments]
    result = weft("workflow", "explain", str(file), "--rows", "2", *given)
    assert result.exit_code != 0
    assert said in result.stderr


# ---- on a server


@pytest.fixture
def server():
    with running() as server:
        yield server


def test_the_graph_runs_on_a_server_and_its_functions_here(weft, file, tmp_path, server):
    out = tmp_path / "out.jsonl"
    result = weft("workflow", "run", str(file), "--row", "topic=the sea", "--url", server.url, "-o", str(out))
    assert result.exit_code == 0, result.stderr
    assert lines(out.read_text())[0]["outputs"]["loud"] == "THE SEA"
    assert "1 row in" in result.stderr
    assert "1 call; " in result.stderr
    listed = weft("workflow", "list", "--url", server.url).stdout.splitlines()
    assert listed[0].split() == ["RUN", "WORKFLOW", "STATUS", "ROWS", "FAILED", "CALLS", "STARTED"]
    assert listed[1].split()[1].startswith("tell@")
    assert listed[1].split()[2:6] == ["finished", "1/1", "0", "1"]


def test_a_run_on_a_server_without_its_prompt_cache(weft, file, server):
    asked, flags = ("workflow", "run", str(file), "--row", "topic=the wind"), ("--no-cache", "--priority", "1")
    first, again, anew = (weft(*asked, "--url", server.url, *more) for more in ((), (), flags))
    assert [one.exit_code for one in (first, again, anew)] == [0, 0, 0], anew.stderr
    assert ["1 answer from the cache" in one.stderr for one in (first, again, anew)] == [False, True, False]
    for more, message in (((), "need --url"), (("--url", server.url, "--cache", "folder"), "either --cache or")):
        refused = weft(*asked, *flags, *more)
        assert (refused.exit_code, message in " ".join(refused.stderr.replace("│", " ").split())) == (2, True)


def test_runs_in_the_background(weft, file, tmp_path, server):
    graph = json.loads(weft("workflow", "show", str(file), "--json").stdout)
    graph["nodes"] = [node for node in graph["nodes"] if node["op"] == "llm"] + [{"id": "person", "op": "external"}]
    graph["outputs"] = {"text": "llm_1", "person": "person"}
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph))
    started = weft("workflow", "run", str(path), "--row", "topic=the sea", "--url", server.url, "--background")
    assert started.exit_code == 0, started.stderr
    run = started.stdout.strip()
    server.wait_until(lambda: len(server.service.workflows.variables.by_id) == 1)
    (variable,) = server.service.workflows.variables.by_id
    shown = weft("workflow", "show", run, "--url", server.url).stdout
    assert f"run: {run} of graph@" in shown, "the name of the file"
    assert "status: running" in shown
    assert f"waits for: {variable} (row 0, person)" in shown
    assert json.loads(weft("workflow", "show", run, "--json", "--url", server.url).stdout)["id"] == run
    assert weft("workflow", "cancel", run, "--url", server.url).stdout == f"{run} cancelled\n"
    resumed = weft("workflow", "resume", run, "--url", server.url)
    assert resumed.exit_code == 0, resumed.stderr
    server.wait_until(lambda: len(server.service.workflows.variables.by_id) == 1)
    server.http().put(f"/v1/variables/{variable}", json={"value": "yes"})
    followed = weft("workflow", "results", run, "--follow", "--url", server.url)
    assert lines(followed.stdout)[0]["outputs"]["person"] == "yes"
    assert weft("workflow", "results", run, "--url", server.url).stdout == followed.stdout
    assert "finished" in weft("workflow", "list", "--url", server.url).stdout
    again = weft("workflow", "resume", run, "--url", server.url)
    assert (again.exit_code, "is finished" in again.stderr) == (1, True)


# ---- a run that waits for a person, in the foreground

ASKS = {
    "version": 1,
    "inputs": ["topic"],
    "nodes": [{"id": "p", "op": "external", "schema": {"type": "string"}}],
    "outputs": {"value": "p"},
}


@pytest.fixture
def asks(tmp_path):
    (path := tmp_path / "asks.json").write_text(json.dumps(ASKS))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"topic": {row}}}\n' for row in range(MAX_WAITS + 2)))
    return path


def in_the_foreground(file, server, *arguments, before=()):
    command = [sys.executable, "-m", "weft.cli.main", "workflow", "run", str(file), "--url", server.url, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Where the tests themselves run under nohup, SIGHUP would be ignored.
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return subprocess.Popen([*before, *command], **pipes, text=True, env=os.environ.copy())
    finally:
        signal.signal(signal.SIGHUP, kept)


def first_wait(process):
    """The run and the variable that it waits for, once the command has named them."""
    run = process.stderr.readline().removeprefix("run: ").strip()
    told = process.stderr.readline()
    assert told.startswith("row 0 waits for p: weft workflow set wvar-"), told
    return run, told.split()[8]


@pytest.mark.slow
def test_a_run_in_the_foreground_says_what_it_waits_for(weft, asks, server):
    process = in_the_foreground(asks, server, "--rows", str(asks.with_name("rows.jsonl")))
    run = process.stderr.readline().removeprefix("run: ").strip()
    told = [process.stderr.readline().rstrip().partition(": ") for _ in range(MAX_WAITS)]
    assert len({what for what, _, _ in told}) == MAX_WAITS
    assert all(re.fullmatch(r"row \d+ waits for p", what) for what, _, _ in told)
    more, _, listing = process.stderr.readline().partition(": ")
    assert more == "the run waits for more values"
    given = [shlex.split(command.replace("VALUE", "yes"))[1:] for _, _, command in told]
    assert [weft(*words).stdout for words in given] == [f"{words[2]} set\n" for words in given]
    by_id = server.service.workflows.variables.by_id
    server.wait_until(lambda: len(by_id) == 2 and not any(words[2] in by_id for words in given))
    first, *_, one, other, how = weft(*shlex.split(listing)[1:]).stdout.splitlines()
    assert first.startswith(f"run: {run} of asks@")
    assert how == f"set a value: weft workflow set VARIABLE VALUE --url {server.url}"
    one, other = (line.removeprefix("waits for: ").partition(" ")[0] for line in (one, other))
    command = how.removeprefix("set a value: weft ").replace("VARIABLE", one).replace("VALUE", "NaN")
    assert weft(*shlex.split(command)).exit_code == 0
    assert weft("workflow", "set", "--url", server.url, "--", other, "-1 or so").exit_code == 0
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert sorted(line["outputs"]["value"] for line in lines(out)) == ["-1 or so", "NaN"] + ["yes"] * MAX_WAITS
    assert errors.startswith("12 rows in"), "nothing is told twice"


def test_values_that_cannot_be_set(weft, asks, server):
    where = ("--url", server.url)
    run = weft("workflow", "run", str(asks), "--row", "topic=x", *where, "--background").stdout.strip()
    server.wait_until(lambda: len(server.service.workflows.variables.by_id) == 1)
    (variable,) = server.service.workflows.variables.by_id

    def refused(*arguments):
        result = weft("workflow", "set", *arguments, *where)
        assert (result.exit_code, result.stdout) == (1, "")
        (line,) = result.stderr.splitlines()
        return line

    assert "There is no variable 'wvar-none'" in refused("wvar-none", "yes")
    told = refused(variable, "42")
    assert "The value of p does not follow its schema: " in told
    assert told.endswith("""for a text, write '"42"'.""")
    assert refused(variable, "{}").endswith("string.")
    assert weft("workflow", "set", variable, '"42"', *where).exit_code == 0
    followed = weft("workflow", "results", run, "--follow", *where)
    assert lines(followed.stdout)[0]["outputs"]["value"] == "42"
    assert "has its value already" in refused(variable, "yes")
    assert "set a value" not in weft("workflow", "show", run, *where).stdout


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGTERM, signal.SIGHUP)])
def test_a_signal_that_ends_the_command_cancels_the_run(weft, asks, server, numbers):
    process = in_the_foreground(asks, server, "--row", "topic=x")
    run, _ = first_wait(process)
    for number in numbers:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in [128 + number for number in numbers], errors
    assert errors == ""
    assert "status: cancelled" in weft("workflow", "show", run, "--url", server.url).stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_same_command_goes_on_after_a_signal(weft, asks, server, tmp_path, number):
    arguments = ("--row", "topic=x", "-o", str(tmp_path / "out.jsonl"))
    process = in_the_foreground(asks, server, *arguments)
    run, variable = first_wait(process)
    process.send_signal(number)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 128 + number
    assert "status: cancelled" in weft("workflow", "show", run, "--url", server.url).stdout
    process = in_the_foreground(asks, server, *arguments)
    assert first_wait(process) == (run, variable)
    assert weft("workflow", "set", variable, "yes", "--url", server.url).exit_code == 0
    process.communicate(timeout=60)
    assert lines((tmp_path / "out.jsonl").read_text())[0]["outputs"]["value"] == "yes"


@pytest.mark.slow
def test_nohup_keeps_a_run(weft, asks, server):
    process = in_the_foreground(asks, server, "--row", "topic=x", "--quiet", before=("nohup",))
    told = process.stderr.readline()
    while not told.startswith("row 0 waits"):  # nohup may say what it does
        assert process.poll() is None
        told = process.stderr.readline()
    process.send_signal(signal.SIGHUP)
    assert weft("workflow", "set", told.split()[8], "yes", "--url", server.url).exit_code == 0
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert lines(out)[0]["outputs"]["value"] == "yes"


def test_lines_beside_bars_stay_whole(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "40")
    line = f"row 0 waits for p: weft workflow set wvar-{'0' * 32} VALUE --url http://127.0.0.1:9000"
    with bars(1, RunCounts()) as show:
        print(line, file=sys.stderr)
        show(RunCounts(1))
    shown = capsys.readouterr().err
    assert f"{line}\n" in shown
    assert "1/1" in shown.partition(line)[2]


CONSTANT = """
import weft
from weft import ops

@weft.flow
def tell(topic, tone="calm"):
    return ops.llm(f"Tell me about {topic} in a {tone} tone.", max_tokens=4)
"""


def test_a_column_named_like_a_constant_is_refused_everywhere(weft, tmp_path, server):
    flow, rows = tmp_path / "constant.py", tmp_path / "rows.csv"
    flow.write_text(CONSTANT)
    rows.write_text("topic,tone\nthe sea,angry\n")
    refusals = {
        (result.exit_code, result.stderr)
        for result in (
            weft("workflow", "run", str(flow), "--rows", str(rows), "--on", server.url),
            weft("workflow", "run", str(flow), "--rows", str(rows), "--url", server.url),
            weft("workflow", "run", str(flow), "--rows", str(rows), "--url", server.url, "--background"),
            weft("workflow", "explain", str(flow), "--rows", str(rows)),
        )
    }
    ((code, said),) = refusals
    assert code == 1
    assert "cannot take the column 'tone': its parameter of this name has a default" in said


def test_a_cache_of_this_process_is_refused_for_a_run_on_a_server(weft, tmp_path, server):
    flow = tmp_path / "constant.py"
    flow.write_text(CONSTANT)
    asked = ("workflow", "run", str(flow), "--row", "topic=x", "--url", server.url, "--cache", str(tmp_path / "cache"))
    results = [weft(*asked), weft(*asked, "--background")]
    assert [result.exit_code for result in results] == [1, 1]
    assert results[0].stderr == results[1].stderr
    assert "a run on a server takes no folder as cache: the server keeps its own" in results[1].stderr


def test_background_runs_have_no_functions_here(weft, file, server):
    for more in ((), ("-o", "x")):
        result = weft("workflow", "run", str(file), "--row", "topic=x", "--url", server.url, "--background", *more)
        assert result.exit_code == 2
        assert "--background needs --url" in " ".join(result.stderr.replace("│", " ").split())


def test_texts_are_shown_while_they_are_written(weft, file):
    with running() as server:
        for where in (("--on", server.url), ("--url", server.url)):
            result = weft("workflow", "run", str(file), "--row", "topic=the sea", "--stream", "text", *where)
            assert result.exit_code == 0, result.stderr
            said = lines(result.stdout)[0]["outputs"]["text"]
            told = result.stderr.splitlines()
            assert told[0 if where[0] == "--on" else 1] == said
            refused = weft("workflow", "run", str(file), "--row", "topic=the sea", "--stream", "loud", *where)
            assert refused.exit_code == 1
            assert "'loud' (function_1) is not the text of one call" in refused.stderr


def test_several_texts_are_shown_by_line():
    from weft.cli.workflow_text import LINE_CHARS, TextDisplay
    from weft.workflow.run.feed import TextDelta

    written = []
    display = TextDisplay(written.append, alone=False)
    display.show(TextDelta(0, "a", 0, "one\ntw"))
    display.show(TextDelta(1, "a", 0, "\x1b[2Jcleared"))
    display.show(TextDelta(0, "a", 6, "o " + "word " * 30))
    display.show(TextDelta(1, "a", 4, "new"))
    display.note("row 2 waits")
    display.end()
    text = "".join(written)
    assert text.startswith("[row 0 a] one\n[row 0 a] two word ")
    assert "\x1b" not in text
    assert "[row 1 a] [2Jcleared\n\n[row 1 a: another try" in text
    assert text.count("word") == 30
    assert max(map(len, text.splitlines())) < LINE_CHARS + 30
    assert "row 2 waits" in text.splitlines()


def test_a_note_does_not_stand_in_the_only_text():
    from weft.cli.workflow_text import TextDisplay
    from weft.workflow.run.feed import TextDelta

    written = []
    display = TextDisplay(written.append, alone=True)
    display.note("run: x")
    display.show(TextDelta(0, "a", 0, "one"))
    display.note("row 0 waits")
    display.show(TextDelta(0, "a", 3, " two"))
    display.end()
    assert "".join(written) == "run: x\none\nrow 0 waits\n two\n"


def test_a_run_on_a_server_is_explained(weft, file):
    with running() as server:
        where = ("--url", server.url)
        result = weft("workflow", "run", str(file), "--row", "topic=the sea", *where)
        assert result.exit_code == 0, result.stderr
        run = weft("workflow", "list", *where).stdout.splitlines()[1].split()[0]
        assert "expected and actual" in weft("workflow", "explain", run, *where).stdout
        assert json.loads(weft("workflow", "explain", run, "--json", *where).stdout)["actual"]["calls"] == 1
        assert weft("workflow", "explain", run, "--svg", *where).stdout.startswith("<svg ")
        assert weft("workflow", "explain", run, "--mermaid", *where).stdout.startswith("flowchart TD")
        refused = weft("workflow", "explain", run, "--rows", "3", *where)
        assert refused.exit_code == 2
    assert weft("workflow", "explain", str(file), "--rows", "3", "--svg").stdout.startswith("<svg ")
    assert weft("workflow", "explain", str(file)).exit_code == 2


PLANNING = [
    (("--no-plan",), {"planning": False}),
    (("--plan",), {"planning": True}),
    (("--pinned-part", "0.1"), {"planning": {"pinned_part": 0.1}}),
    (("--objective", "ttft"), {"objective": "ttft"}),
    (("--objective", "text=batch", "--objective", "loud=latency"), {"objective": {"text": "batch", "loud": "latency"}}),
    (("--objective", "deadline", "--deadline", "90"), {"objective": "deadline", "deadline_s": 90.0}),
]


@pytest.mark.parametrize(("flags", "options"), PLANNING)
def test_flags_of_planning_are_options_of_the_run(weft, file, monkeypatch, flags, options):
    made = []
    monkeypatch.setattr(GraphRun, "__init__", lambda self, graph, rows, on, given: made.append(given) or 1 / 0)
    weft("workflow", "run", str(file), "--row", "topic=x", "--on", "http://127.0.0.1:9", *flags)
    assert made[0].items() >= options.items()
    assert made[0].keys() - options.keys() <= {"limits", "functions"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--objective", "soon"), "'soon' is not an objective"),
        (("--objective", "sound=ttft"), "there is no output 'sound'"),
        (("--objective", "deadline"), "needs deadline_s"),
        (("--objective", "text=ttft", "--objective", "batch"), "one --objective for all outputs"),
        (("--objective", "text=ttft", "--objective", "text=batch"), "two objectives"),
        (("--pinned-part", "0.9"), "pinned_part"),
        (("--pinned-part", "0.1", "--no-plan"), "--no-plan pins nothing"),
    ],
)
def test_flags_of_planning_that_mean_nothing_are_refused_by_name(weft, file, flags, said):
    result = weft("workflow", "run", str(file), "--row", "topic=x", "--on", "http://127.0.0.1:9", *flags)
    assert result.exit_code != 0
    assert said in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("flags", "objective", "deadline_s"),
    [
        (("--objective", "text=batch"), "batch", None),
        (("--objective", "text=batch", "--no-plan"), "throughput", None),  # only plans tell calls of single outputs
        (("--objective", "deadline", "--deadline", "900", "--no-plan"), "deadline", 900.0),
    ],
)
def test_flags_of_planning_reach_a_server(weft, file, tmp_path, server, flags, objective, deadline_s):
    out = ("-o", str(tmp_path / "out.jsonl"), "--url", server.url)
    result = weft("workflow", "run", str(file), "--row", "topic=x", *out, *flags)
    assert result.exit_code == 0, result.stderr
    [opened] = server.on_loop(lambda: [each for each in server.engine.sent if isinstance(each, Open)])
    assert opened.objective == objective
    assert opened.deadline_s == deadline_s or 800 < opened.deadline_s < deadline_s


def test_an_objective_that_does_not_exist_is_refused_by_the_server(weft, file, server):
    result = weft("workflow", "run", str(file), "--row", "topic=x", "--objective", "soon", "--url", server.url)
    assert result.exit_code != 0
    assert "objective" in result.stderr
    assert "soon" in result.stderr


def test_results_that_are_held_have_a_size(weft, file):
    rows = ("--row", "topic=the sea", *SMALL)
    result = weft("workflow", "run", str(file), "--max-run-size", "10", *rows)
    assert result.exit_code == 1
    assert "10 bytes (max_run_bytes)" in result.stderr
    assert weft("workflow", "run", str(file), "--max-run-size", "1MiB", *rows).exit_code == 0
    for more in (("--max-run-size", "much"), ("--max-run-size", "1MiB", "--background", "--url", "http://127.0.0.1:9")):
        assert weft("workflow", "run", str(file), *more, "--row", "topic=x").exit_code == 2
