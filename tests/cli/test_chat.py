"""The terminal chat: its commands over a scripted talker, the remote talker over a fake server, and the whole."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
from collections.abc import Iterator

import httpx
import pytest

from weft.abi.errors import WeftError
from weft.cli.chat import ChatSession
from weft.cli.talk import RemoteTalker
from weft.cli.wrapping import WordWrap


class Script:
    """Says what it was told to; an exception in an answer is raised at its place."""

    name = "scripted"
    description = "a script"

    def __init__(self, *answers: list[object]):
        self.answers = list(answers)
        self.asked: list[list[dict[str, str]]] = []

    def reply(self, messages, options) -> Iterator[str]:
        self.asked.append(list(messages))
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def close(self) -> None:
        pass


def play(
    talker: Script, *lines: str | BaseException, system: str | None = None, interactive: bool = True
) -> ChatSession:
    waiting = list(lines)

    def read(prompt: str) -> str:
        if not waiting:
            raise EOFError
        line = waiting.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    session = ChatSession(talker, {}, system, interactive=interactive, read=read)
    session.run()
    return session


def test_the_conversation_grows(capsys):
    talker = Script(["I am", " Weft."], ["Yes."])
    play(talker, "Who are you?", "", "Really?", system="Be brief.")
    assert talker.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "I am Weft."},
        {"role": "user", "content": "Really?"},
    ]
    assert capsys.readouterr().out == "I am Weft.\nYes.\n"


def test_ctrl_c_stops_the_answer_and_not_the_chat():
    talker = Script(["half", KeyboardInterrupt()], ["whole"])
    session = play(talker, "one", KeyboardInterrupt(), "two")
    assert [message["content"] for message in session.messages] == ["one", "half", "two", "whole"]


def test_a_question_that_fails_is_taken_back(capsys):
    session = play(Script([WeftError("too long")], ["fine"]), "one", "two")
    assert [message["content"] for message in session.messages] == ["two", "fine"]
    assert "weft: too long" in capsys.readouterr().err


def test_in_a_pipe_an_error_ends_the_chat():
    with pytest.raises(WeftError, match="too long"):
        play(Script([WeftError("too long")]), "one", interactive=False)


def test_commands(capsys, tmp_path):
    file = tmp_path / "chat.json"
    talker = Script(["1"], ["2"], ["3"])
    play(talker, "/help", "/nothing", "a", "/reset", "b", "/system Rhyme.", "//c", f"/save {file}", "/exit", "never")
    assert [len(asked) for asked in talker.asked] == [1, 1, 2]
    assert talker.asked[2][1]["content"] == "/c"
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    err = capsys.readouterr().err
    assert "Unknown command /nothing" in err
    assert all(f"/{name}" in err for name in ("help", "reset", "system", "save", "exit"))


def test_save_says_why_it_cannot(capsys):
    play(Script(), "/save", "/save /no/such/folder/x", "/save ~no-such-user/x")
    err = capsys.readouterr().err
    assert "~no-such-user/x: Could not determine home directory" in err
    assert "needs a file name" in err
    assert "cannot be written: No such file" in err


def remote(handler) -> RemoteTalker:
    return RemoteTalker("http://server/v1", None, "key", httpx.Client(transport=httpx.MockTransport(handler)))


def test_a_server_is_asked_for_its_model_and_streamed():
    bodies: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        bodies.append(json.loads(request.content))
        events = [{"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "h\u2028i"}}]}]
        text = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text)

    talker = remote(handler)
    assert talker.name == "served"
    assert list(talker.reply([{"role": "user", "content": "x"}], {"max_tokens": 3})) == ["h\u2028i"]
    assert bodies[0]["model"] == "served"
    assert (bodies[0]["stream"], bodies[0]["max_tokens"]) == (True, 3)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "No valid API key"}}), "answered 401: No valid API key"),
        (httpx.Response(502, text="bad gateway"), "answered 502: bad gateway"),
        (httpx.Response(200, json={"data": []}), "does not list models"),
    ],
)
def test_what_a_server_refuses_is_told(response, message):
    with pytest.raises(WeftError, match=message):
        remote(lambda request: response)


def test_an_error_in_the_stream_is_raised():
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        return httpx.Response(200, text='data: {"error": {"message": "it broke"}}\n\n')

    with pytest.raises(WeftError, match="it broke"):
        list(remote(handler).reply([], {}))


def test_a_server_that_is_not_there(weft):
    result = weft("chat", "--url", "http://127.0.0.1:1", input="")
    assert result.exit_code == 1
    assert "no server answers at http://127.0.0.1:1" in result.stderr


def test_the_embedded_model_answers_in_a_pipe(weft):
    result = weft("chat", "--max-tokens", "3", "--temperature", "0", "--num-pages", "64", input="Hello\nAnd you?\n")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 2


def test_the_model_is_introduced_and_may_be_given_as_a_flag(weft, tmp_path):
    (tmp_path / "other.gguf").touch()
    assert "is not a GGUF file" in weft("chat", "--model", str(tmp_path / "other.gguf"), input="").stderr
    assert weft("chat", "weft-tiny", "--model", "weft-tiny").exit_code == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wrapped(*pieces: str, columns: int = 10) -> str:
    out = Terminal()
    screen = WordWrap(out, lambda: columns)
    for piece in pieces:
        screen.write(piece)
    screen.finish()
    return out.getvalue()


def test_answers_are_broken_between_words():
    text = "one two three four\n  five and-a-very-long-word six"
    assert wrapped(text) == "one two\nthree four\n  five\nand-a-very-long-word\nsix"
    assert wrapped(*text) == wrapped(text)
    assert wrapped("日本 日本 日本") == "日本 日本\n日本"
    assert wrapped(text, columns=0) == text


def test_a_file_gets_the_text_as_it_is():
    out = io.StringIO()
    screen = WordWrap(out)
    screen.write("word " * 100)
    screen.finish()
    assert out.getvalue() == "word " * 100


@pytest.mark.slow
def test_on_a_terminal_pasted_lines_are_one_message(tmp_path):
    file = tmp_path / "chat.json"
    command = [sys.executable, "-m", "weft.cli.main", "chat", "--max-tokens", "2", "--num-pages", "64"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
        os.execv(command[0], command)
    seen = b""

    def read_until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(terminal, 4096)
        seen = seen.partition(text)[2]

    read_until(b"5 million parameters")
    read_until(b"> ")
    os.write(terminal, b"\x1b[200~Hello!\nWho are you?\x1b[201~\r")
    read_until(b"> ")
    os.write(terminal, f"/save {file}\r".encode())
    read_until(b"Saved 2 messages")
    os.write(terminal, b"/exit\r")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert json.loads(file.read_text())["messages"][0] == {"role": "user", "content": "Hello!\nWho are you?"}
