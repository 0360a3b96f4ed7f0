"""Requests that are wrong, odd, or merely rare."""

from __future__ import annotations

import httpx
import pytest

from tests.server.conftest import RunningServer, ids, running
from weft.core import wire
from weft.endpoints.fields import ADVISORY, REFUSED
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.completion import CompletionRequest
from weft.testing.byte_tokenizer import CHATML, byte_tokenizer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{", "JSON"),
        (b'{"messages": NaN}', "JSON"),
        (b'{"messages": "\xff"}', "JSON"),
        (b'{"messages": "\\ud800"}', "JSON"),
        (b'{"temperature": 1e999}', "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'"text"', "object"),
        (b"[" * 100_000, "nested"),
        (b'{"messages": ' + b"[" * 100_000, "nested"),
        (b"{}", "messages is required"),
    ],
)
def test_bodies_that_are_no_request(server: RunningServer, body: bytes, says: str) -> None:
    with server.http() as client:
        response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert says in error_of(response)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**12}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_completion_tokens": []}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [264]}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 257}, "top_logprobs"),
        ({"prompt_logprobs": 257}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": 1001}, "priority"),
        ({"objective": "fast"}, "objective"),
        ({"objective": ["latency"]}, "objective"),
        ({"objective": "deadline"}, "deadline_s"),
        ({"objective": "batch", "deadline_s": 5}, "deadline_s"),
        ({"objective": "deadline", "deadline_s": 0}, "deadline_s"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options"),
        ({"model": 5}, "model"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_wrong_fields_are_named(server: RunningServer, fields: dict, param: str) -> None:
    error = error_of(server.chat(**fields))
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param)
    assert param.partition("[")[0] in error["message"]


def test_a_value_that_is_none_of_a_list_is_refused_with_the_list(server: RunningServer) -> None:
    message = error_of(server.chat(objective="fast"))["message"]
    assert message == "objective: Invalid enum value 'fast'; there are latency, ttft, throughput, deadline, batch."


def test_a_part_that_is_no_text_is_refused_for_its_type(server: RunningServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    error = error_of(server.chat(messages=[{"role": "user", "content": [image]}]))
    assert error["param"] == "messages[0].content[0]"
    assert error["message"] == "messages[0].content[0] is image input, which this model does not take; send text"


def test_effort_and_verbosity_reach_the_chat_template() -> None:
    template = CHATML + "{% if reasoning_effort %}[{{ reasoning_effort }}|{{ verbosity }}]{% endif %}"
    with running(tokenizer=byte_tokenizer(template)) as server:

        def prompt(**fields) -> str:
            answer = server.chat(return_token_ids=True, **fields).json()
            return bytes(token for token in answer["prompt_token_ids"] if token < 256).decode()

        assert prompt(reasoning_effort="high", verbosity="low").endswith("[high|low]")
        given = {"chat_template_kwargs": {"reasoning_effort": "none"}}
        assert prompt(reasoning_effort="high", verbosity="low", **given).endswith("[none|low]")
        assert not prompt().endswith("]")
    with running(tokenizer=byte_tokenizer(CHATML)) as server:
        assert prompt(reasoning_effort="high") == prompt()
        assert server.chat(reasoning_effort=3).status_code == 400


HARMFUL = {
    "parallel_tool_calls": False,
    "spaces_between_special_tokens": False,
    "tools": [{"name": "f"}],
    "logits_processors": ["x"],
    "suffix": " end",
    "modalities": ["text", "audio"],
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "mm_processor_kwargs": {"x": 1},
    "include_reasoning": False,
}


@pytest.mark.parametrize(("kind", "path"), [(ChatRequest, CHAT), (CompletionRequest, "/v1/completions")])
def test_unsupported_fields_are_refused_by_name(server: RunningServer, kind: type, path: str) -> None:
    base = {"messages": USER} if kind is ChatRequest else {"prompt": "ab"}
    with server.http() as client:
        for name, refusal in REFUSED[kind].items():
            error = error_of(client.post(path, json=base | {name: HARMFUL.get(name, True)}))
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert error["message"].startswith(f"{name} is not supported. ")
            for harmless in (None, *refusal.harmless):
                response = client.post(path, json=base | {"max_tokens": 1, name: harmless})
                assert response.status_code == 200, (name, harmless, response.text)


def test_best_of_must_be_n(server: RunningServer) -> None:
    assert error_of(server.chat(n=2, best_of=3))["param"] == "best_of"
    assert server.chat(n=2, best_of=2).status_code == 200
    assert server.chat(best_of=1).status_code == 200
    assert server.chat(best_of=None).status_code == 200


def test_advisory_fields_are_accepted(server: RunningServer) -> None:
    assert server.chat(**{name: {"any": "thing"} for name in ADVISORY}).status_code == 200


def test_nulls_are_absent_fields(server: RunningServer) -> None:
    names = set(ChatRequest.__struct_fields__) - {"messages", "max_tokens"}
    assert server.chat(**dict.fromkeys(names)).status_code == 200


def test_unknown_fields_are_refused_with_near_names(server: RunningServer) -> None:
    error = error_of(server.chat(temprature=0))
    assert error["param"] == "temprature"
    assert "temperature" in error["message"]
    assert len(error_of(server.chat(**{"x" * 10_000: 1}))["message"]) < 500


def test_history_with_tool_calls_and_rendered_tools(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert server.chat(messages=messages, tools=tools, tool_choice="none").status_code == 200
    assert server.chat(messages=messages, tool_choice="auto", tools=[]).status_code == 200
    # What a model wrote can be sent back to it.
    for arguments in ("{", "[1]", "null", "5", '"x"', ""):
        assert server.chat(messages=[call_with(call, arguments)]).status_code == 200


def call_with(call: dict, arguments: str) -> dict:
    function = call["function"] | {"arguments": arguments}
    return {"role": "assistant", "tool_calls": [call | {"function": function}]}


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_other_content_types(server: RunningServer, content_type: str) -> None:
    with server.http() as client:
        headers = {"content-type": content_type} if content_type else {}
        response = client.post(CHAT, content=b'{"messages": []}', headers=headers)
        error_of(response, 415)
        good = {"content-type": "Application/JSON; charset=utf-8"}
        assert client.post(CHAT, content=b'{"prompt": "a"}', headers=good).status_code == 400
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        refused = client.post(CHAT, content=b"x", headers=packed)
        error_of(refused, 415)
        assert refused.headers["accept-encoding"] == "identity"


def test_methods_and_paths(server: RunningServer) -> None:
    with server.http() as client:
        wrong = client.get(CHAT)
        assert "POST" in error_of(wrong, 405)["message"]
        assert wrong.headers["allow"] == "POST"
        assert "takes POST, not TRACE" in error_of(client.request("TRACE", CHAT), 405)["message"]
        for path in ("/v1", "/v1/chat/completions/", "//v1/models", "/V1/models", "/%00"):
            error_of(client.get(path), 404)
        head = client.head("/health")
        assert (head.status_code, head.content) == (200, b"")


def test_model_may_be_left_out_only_when_there_is_one(server: RunningServer) -> None:
    assert server.chat().status_code == 200
    with running(names=["a", "b/c"]) as other:
        assert [card["id"] for card in other.http().get("/v1/models").json()["data"]] == ["a", "b/c"]
        assert other.http().get("/v1/models/b/c").json()["id"] == "b/c"
        assert other.chat(model="b/c").json()["model"] == "b/c"
        message = error_of(other.chat(model="d"), 404)["message"]
        assert "a, b/c" in message


def test_paths_of_the_machine_are_not_told(server: RunningServer) -> None:
    with server.http() as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/docs"):
            assert "/somewhere" not in client.get(path).text


def test_a_model_without_a_chat_template_says_what_helps() -> None:
    with running(tokenizer=byte_tokenizer(None)) as server:
        error = error_of(server.chat())
        assert error["code"] == "unsupported_parameter"
        assert "pass chat_template" not in error["message"]  # which this API refuses
        assert "/v1/completions" in error["message"]
        assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status_code == 200


def test_continue_final_message(server: RunningServer) -> None:
    turns = [*USER, {"role": "assistant", "content": "It is"}]
    body = {"messages": turns, "continue_final_message": True}
    tokens = server.post("/tokenize", body).json()["tokens"]
    assert bytes(tokens[-5:]) == b"It is"
    assert server.chat(**body).json()["usage"]["prompt_tokens"] == len(tokens)
    closed = server.post("/tokenize", {"messages": turns, "add_generation_prompt": False}).json()["tokens"]
    assert len(closed) == len(tokens) + 2


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "a", "foo": 1}]}, ""),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}]}]}, ""),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "foo": 1}}]}]}, ""),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"foo": 1, "function": {"name": "f"}}]}]}, ""),
        (CHAT, {"messages": [{"role": "user", "content": "a", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "foo": 1}}]}, ""),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}, "foo": 1}]}, ""),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f", "foo": 1}}}, ""),
        (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"foo": 1, "mode": "required"}}}, ""),
        (CHAT, {"response_format": {"type": "json_object", "foo": 1}}, ""),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "foo": 1, "schema": {}}}}, ""),
        (CHAT, {"structured_outputs": {"regex": "a", "foo": True}}, ""),
        (CHAT, {"stream": True, "stream_options": {"foo": True}}, ""),
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ("/v1/completions", {"response_format": {"type": "json_object", "foo": 1}}, ""),
        ("/v1/completions", {"stream": True, "stream_options": {"foo": True}}, ""),
        ("/tokenize", {"messages": [{"role": "user", "content": "a", "foo": 1}]}, ""),
        ("/tokenize", {"messages": USER, "tools": [{"function": {"name": "f", "foo": 1}}]}, ""),
        ("/v1/runs", {"source": "def main(): pass", "limits": {"foo": 1}}, ""),
    ],
)
def test_unknown_fields_inside_fields_are_refused(server: RunningServer, path: str, fields: dict, place: str) -> None:
    base = {CHAT: {"messages": USER}, "/v1/completions": {"prompt": "a"}}.get(path, {})
    error = error_of(server.post(path, base | fields))
    assert error["param"] == place or error["param"].endswith(".foo")
    assert error["param"].startswith(next(iter(fields.keys() - {"stream", "source", "messages"}), "messages"))
    assert error["param"] in error["message"]


def test_what_only_advises_or_is_null_is_accepted_inside_fields_too(server: RunningServer) -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    answer = {"role": "assistant", "content": "b", "annotations": [], "audio": None, "tool_calls": None}
    assert server.chat(messages=[{"role": "user", "content": [part]}, answer, *USER]).status_code == 200
    called = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [*USER, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "c", "content": ""}]
    assert server.post("/tokenize", {"messages": chat}).status_code == 200


def test_truncation_keeps_the_end(server: RunningServer) -> None:
    def last(count: int, **fields) -> list[int]:
        body = {"prompt": "abcdef", "truncate_prompt_tokens": count, "return_token_ids": True, "max_tokens": 1}
        return server.post("/v1/completions", body | fields).json()["choices"][0]["prompt_token_ids"]

    assert last(2) == ids("ef")
    assert last(100) == ids("abcdef")
    assert len(last(-1, prompt="x" * 9000, max_tokens=10)) == 4096 - 10
    assert last(3, prompt=ids("uvwxyz")) == ids("xyz")
    assert server.chat(truncate_prompt_tokens=5).json()["usage"]["prompt_tokens"] == 5
    for path, body in (("/v1/completions", {"prompt": "ab"}), ("/v1/embeddings", {"input": "ab"})):
        nothing = error_of(server.post(path, body | {"truncate_prompt_tokens": 0}))
        assert nothing["param"] == "truncate_prompt_tokens"
        assert "truncate_prompt_tokens is 0" in nothing["message"]


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ({"5": 1, "wörd": 1}, 'logit_bias["wörd"] has a key of the wrong type'),
        ({"5": 1, "7": "much"}, 'logit_bias["7"]: Expected float, got str.'),
        ({"5": None}, 'logit_bias["5"]: Expected float, got null.'),
        ({"5": 1, "6": -101}, 'logit_bias["6"] must be in [-100, 100], got -101'),
        ({"5": 1, "70000": 1}, "logit_bias names token 70000"),
        ([5], "logit_bias: Expected object, got array."),
    ],
)
def test_errors_of_a_bias_name_its_key(server: RunningServer, bias: object, says: str) -> None:
    error = error_of(server.chat(logit_bias=bias))
    assert says in error["message"]
    assert error["param"].startswith("logit_bias")


def test_context_is_told_in_numbers(server: RunningServer) -> None:
    body = {"prompt": "x" * 4000, "max_tokens": 200}
    error = error_of(server.post("/v1/completions", body))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert all(number in error["message"] for number in ("4096", "4000", "200", "96"))
    assert server.post("/v1/completions", body | {"max_tokens": 96}).status_code == 200
    chat = error_of(server.chat(messages=[{"role": "user", "content": "x" * 4096}], max_tokens=None))
    assert (chat["code"], chat["param"]) == ("context_length_exceeded", "messages")
    # Far too long to be worth tokenizing: refused by its size.
    huge = error_of(server.post("/v1/completions", {"prompt": "x" * 3_000_000}))
    assert "characters" in huge["message"]


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
@pytest.mark.parametrize("wrong", ["", "x" * 5000, "x" * 3_000_000, [], [999], [1.5]])
def test_the_wrong_one_of_several_is_named(server: RunningServer, path: str, field: str, wrong: object) -> None:
    good = [97] if isinstance(wrong, list) else "a"
    error = error_of(server.post(path, {field: [good, good, wrong, good]}))
    assert error["param"].startswith(f"{field}[2]")
    assert error_of(server.post(path, {field: [wrong]}))["param"].startswith(field)


def test_bad_words_become_token_sequences(server: RunningServer) -> None:
    server.on_loop(server.engine.sent.clear)
    assert server.chat(bad_words=["no", " never"]).status_code == 200
    words = server.on_loop(lambda: [c for c in server.engine.sent if type(c).__name__ == "Generate"])[0].sampling
    assert words.bad_words == [ids("no"), ids(" no"), ids(" never")]


def test_every_sampling_field_reaches_the_engine(server: RunningServer) -> None:
    server.on_loop(server.engine.sent.clear)
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "seed": 11,
        "allowed_token_ids": [97, 98],
    }
    stop = {"stop": ["zz"], "stop_token_ids": [99], "min_tokens": 2, "ignore_eos": True}
    response = server.chat(**sampling, **stop, logit_bias={"97": 1.5}, priority=-3, max_completion_tokens=6)
    assert response.status_code == 200
    sent = {type(command).__name__: command for command in server.on_loop(lambda: list(server.engine.sent))}
    generate = sent["Generate"]
    assert {name: getattr(generate.sampling, name) for name in sampling} == sampling
    assert generate.sampling.logit_bias == {97: 1.5}
    assert (generate.stop.stop, generate.stop.stop_token_ids) == ([b"zz"], [99])
    assert (generate.stop.min_tokens, generate.stop.ignore_eos, generate.stop.max_tokens) == (2, True, 6)
    assert sent["Open"].priority == -3
    assert (sent["Open"].objective, sent["Open"].deadline_s) == ("latency", None)


def test_objectives_reach_the_engine(server: RunningServer) -> None:
    for path, prompt in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        for fields in ({"objective": "batch"}, {"objective": "deadline", "deadline_s": 30.5}):
            assert server.post(path, {"max_tokens": 2} | prompt | fields).status_code == 200
            commands = server.on_loop(lambda: list(server.engine.sent))
            opened = [command for command in commands if isinstance(command, wire.Open)][-1]
            assert opened.objective == fields["objective"]
            if "deadline_s" in fields:
                assert 0 < opened.deadline_s <= 30.5, "what is left of it"
