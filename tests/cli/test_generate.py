"""`weft generate` on the embedded model."""

from __future__ import annotations

import json
import re

import pytest

from weft.cli.generate import split_words

SMALL = ("--temperature", "0", "--max-tokens", "4", "--num-pages", "256", "--max-running", "8")


@pytest.mark.parametrize(
    ("words", "model", "expected"),
    [
        ([], None, (None, None)),
        (["Once upon"], None, (None, "Once upon")),
        (["weft-tiny"], None, ("weft-tiny", None)),
        (["org/name"], None, ("org/name", None)),
        (["."], None, (".", None)),
        (["what/ever is this"], None, (None, "what/ever is this")),
        (["x" * 10_000], None, (None, "x" * 10_000)),
        (["a model", "a prompt"], None, ("a model", "a prompt")),
        (["org/name"], "weft-tiny", ("weft-tiny", "org/name")),
    ],
)
def test_which_word_is_what(words, model, expected):
    assert split_words(words, model) == expected


def test_argument_pipe_and_file_are_the_same_prompt(weft, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon a time")
    by_argument = weft("generate", "Once upon a time", *SMALL)
    assert by_argument.exit_code == 0, by_argument.stderr
    assert len(by_argument.stdout.strip()) > 0
    assert weft("generate", *SMALL, input="Once upon a time").stdout == by_argument.stdout
    assert weft("generate", "weft-tiny", "--file", str(file), *SMALL).stdout == by_argument.stdout
    assert weft("generate", "Once upon a time", "--stream", *SMALL).stdout == by_argument.stdout


def test_json_has_everything(weft):
    result = weft("generate", "Once upon a time", "--json", "-n", "2", "--logprobs", "1", "--seed", "5", *SMALL)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["outputs"]) == 2
    output = found["outputs"][0]
    assert len(output["token_ids"]) == len(output["logprobs"]) == 4
    assert output["finish_reason"] == "length"
    usage = found["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["cached_tokens"] + usage["recomputed_tokens"] + usage["new_tokens"] == usage["prompt_tokens"]
    assert (usage["host_tokens"], usage["first_different_token"]) == (0, None)


def test_chat_is_another_prompt_than_raw(weft):
    raw = json.loads(weft("generate", "Hello", "--json", *SMALL).stdout)
    chat = json.loads(weft("generate", "Hello", "--json", "--chat", *SMALL).stdout)
    told = json.loads(weft("generate", "Hello", "--json", "--chat", "--system", "Be brief.", *SMALL).stdout)
    sizes = [one["usage"]["prompt_tokens"] for one in (raw, chat, told)]
    assert sizes == sorted(set(sizes))


def test_jsonl_keeps_the_order_and_goes_on_after_an_error(weft):
    long = "word " * 5000
    result = weft("generate", "--jsonl", *SMALL, input=f"Once\n\n{long}\r\nThe cat\n")
    assert result.exit_code == 1
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["line"] for line in lines] == [1, 3, 4]
    assert lines[1]["error"]["type"] == "context_too_long"
    assert len(lines[0]["outputs"][0]["token_ids"]) == len(lines[2]["outputs"][0]["token_ids"]) == 4


def test_a_pipe_that_is_too_long_is_named_with_what_helps(weft):
    for stream in ("--stream", "--no-stream"):
        result = weft("generate", "--chat", "--system", "Summarise this.", stream, input="word " * 5000)
        assert result.exit_code == 1
        assert re.fullmatch(
            r"weft: standard input is too long for weft-tiny: the prompt has \d+ tokens .* takes 2048 in all; "
            r"shorten the prompt or lower max_tokens, or choose another --model\n",
            result.stderr,
        )


def test_an_empty_pipe_is_no_prompt(weft, tmp_path):
    (tmp_path / "blank.txt").write_text(" \n")
    result = weft("generate", "--chat", "--system", "Summarise this.", input="")
    assert (result.exit_code, result.stderr) == (1, "weft: standard input is empty; it must contain a prompt\n")
    assert "blank.txt is empty" in weft("generate", "--file", str(tmp_path / "blank.txt")).stderr


def test_a_file_of_weights_is_a_model_and_named_as_what_it_is(weft, tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    for words in ([str(file)], [str(file), "Hello"], ["--model", str(file), "Hello"]):
        result = weft("generate", *words, input="Hello")
        assert result.exit_code == 1
        assert "model.gguf is not a GGUF file" in result.stderr


def test_several_answers_cannot_be_streamed(weft):
    result = weft("generate", "Hello", "--stream", "-n", "2", *SMALL)
    assert result.exit_code == 1
    assert "--no-stream" in result.stderr


def test_a_file_that_is_not_there(weft):
    result = weft("generate", "--file", "/no/such/file", *SMALL)
    assert (result.exit_code, result.stderr) == (1, "weft: /no/such/file cannot be read: No such file or directory\n")


def test_a_pipe_that_is_no_text(weft):
    result = weft("generate", *SMALL, input=b"\xff\xfe")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "standard input is not UTF-8 text" in result.stderr
