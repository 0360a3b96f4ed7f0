"""What crosses a socket comes back equal, and nothing else is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft.abi import errors
from weft.core import wire
from weft.core.cost.model import ForwardModel
from weft.core.ids import pack_tokens, unpack_tokens
from weft.core.sampling import SamplingParams, StopParams, check_logprobs

COMMANDS: list[wire.Command] = [
    wire.Hello(),
    wire.Open(seq=1, tenant="t", namespace="n", priority=-3, request_id="r"),
    wire.Open(seq=1, objective="deadline", deadline_s=2.5),
    wire.Append(seq=1, op=2, tokens=pack_tokens([1, 2, 3]), outputs=wire.PromptOutputs(logprobs=2, hidden="mean")),
    wire.Generate(
        seq=1,
        op=3,
        sampling=SamplingParams(logit_bias={5: 1.5}, bad_words=[[1, 2]], seed=-7),
        stop=StopParams(stop=[b"\xff\x00"], max_tokens=3),
    ),
    wire.Fork(seq=1, child=2),
    wire.Truncate(seq=1, num_tokens=0),
    wire.Hold(seq=1, ttl_s=0.5, op=21),
    wire.Release(seq=1),
    wire.Cancel(seq=2),
    wire.SetPriority(seq=2, priority=9),
    wire.Expect(seq=2, kind="http", expected_in_s=1.5, op=22),
    wire.Retain(op=23, seq=2, ttl_s=5.0, weight=float("inf")),
    wire.Retain(op=24, tokens=pack_tokens([1, 2]), namespace="n", ttl_s=5.0),
    wire.EndRetain(op=25, retain=23),
    wire.Demote(op=26, seq=2),
    wire.Prefetch(op=27, tokens=pack_tokens([1, 2])),
    wire.MaskTokens(seq=2, op=4, ranges=bytes(8)),
    wire.OpenSpace(space=1, op=4, tenant="t", namespace="n", priority=1, request_id="r", reserve_pages=3),
    wire.OpenQueue(space=1, queue=1, op=5, priority=-1),
    wire.SetQueuePriority(space=1, queue=1, op=6, priority=2),
    wire.AllocPages(space=1, queue=1, op=7, first=2**32 - 2, count=1),
    wire.AllocEmbeds(space=1, queue=1, op=8, first=0, count=2),
    wire.EmbedText(space=1, queue=1, op=9, tokens=b"\x01\0\0\0", positions=bytes(4), embeds=bytes(4)),
    wire.Forward(space=1, queue=1, op=10, read=b"", inputs=bytes(4), write=bytes(4), outputs=bytes(4), mask=b"\x01"),
    wire.ForwardSample(space=1, queue=1, op=11, read=b"", tokens=bytes(4), positions=bytes(4), index=3),
    wire.NextDist(space=1, queue=1, op=12, k=5, embeds=bytes(4), targets=bytes(8)),
    wire.CopyTokens(space=1, queue=1, op=13, source=1, source_offset=2, target=3, target_offset=4, count=5),
    wire.MaskPage(space=1, queue=1, op=14, page=1, hidden=0xFFFFFFFF),
    wire.ExportPages(space=1, queue=1, op=15, pages=bytes(4), name="n"),
    wire.ImportPages(space=1, queue=1, op=16, first=9, name="n"),
    wire.ReleaseExport(space=1, queue=1, op=17, name="n"),
    wire.FreePages(space=1, queue=1, op=18, pages=bytes(4)),
    wire.FreeEmbeds(space=1, queue=1, op=19, embeds=bytes(4)),
    wire.Sync(space=1, queue=1, op=20),
    wire.CloseQueue(space=1, queue=1, op=21),
    wire.CloseSpace(space=1),
    wire.ExpectSpace(space=1, kind="http", expected_in_s=1.5),
    wire.Ping(),
    wire.Drain(),
    wire.ResetPrefixCache(),
    wire.ListSessions(query=1, tenant="t", limit=5),
]


_SCORES = wire.TokenLogprobs(-0.5, 1, [3, 4], [-0.5, -2.0])
_INFO = wire.EngineInfo(
    model="m",
    vocab_size=100,
    hidden_size=8,
    page_size=32,
    num_device_pages=10,
    num_host_pages=5,
    max_context=64,
    max_running=4,
    max_step_tokens=16,
    eos_token_ids=[2],
    device="cpu",
    dtype="float32",
    bytes_per_page=4096,
    pid=17,
    explicit_pages=True,
    num_embeds=6,
    max_space_pages=7,
    forward=ForwardModel(0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, (8,), (0.0, 0.125)),
)
EVENTS: list[wire.Event] = [
    wire.Token(1, 5, 2, _SCORES),
    wire.Started(op=1, num_prompt_tokens=9, num_cached_tokens=5, num_continued_tokens=4, queued_s=0.5),
    wire.Finished(op=1, stop="x", cut_bytes=1, prompt_logprobs=[None, _SCORES], hidden=[0.5]),
    wire.Finished(op=1, reason="length", stop=17, usage=wire.OperationUsage(9, 5, 3, 4, 0.5, 0.25, 1.0, 2, 1, 7, 4, 6)),
    wire.Finished(op=1, tokens=b"\x01\0\0\0", dists=wire.Dists(b"\x02\0\0\0", bytes(4), bytes(8)), count=3),
    wire.Failed(op=2, error=wire.ErrorRecord("overloaded", "m", "p")),
    wire.Failed(op=2, error=wire.ErrorRecord("overloaded", "m", retry_after_s=2.5)),
    wire.Cancelled(op=3),
    wire.Welcome(info=_INFO),
    wire.Loading(1, 2),
    wire.Drained(),
    wire.Sessions(
        query=4,
        sessions=[
            wire.SessionInfo(
                id=1,
                request_id="r",
                state="finished",
                kind="chat",
                num_tokens=9,
                device_tokens=4,
                host_tokens=3,
                gone_tokens=1,
                waited_s=0.5,
                expected_in_s=2.0,
                expected_by="learned",
            )
        ],
        total=7,
    ),
    wire.Stats(stats=wire.EngineStats(finished={"stop": 1}, step_time=wire.HistogramSnapshot((0.5,), [1, 2], 3.0))),
    wire.TraceSpan("r", "chunk", 1.5, 3),
]


def test_commands_travel() -> None:
    assert wire.decode_commands(wire.encode_commands(COMMANDS)) == COMMANDS
    every = set(wire.concrete(wire.Command, wire.COMMAND_MODULES))
    assert {type(command) for command in COMMANDS} == every, "a command is not tried"


def test_events_travel() -> None:
    envelope = wire.Envelope(4, EVENTS)
    assert wire.decode_envelope(wire.encode_envelope(envelope)) == envelope
    assert {type(event) for event in EVENTS} == set(wire.Event.__args__), "an event is not tried"


def test_the_bytes_of_a_protocol_version_do_not_change() -> None:
    """`wire_bytes.txt` holds the version and what each message above was in it."""
    lines = [f"version {wire.PROTOCOL_VERSION}"]
    lines += [f"{type(command).__name__} {wire.encode_commands([command]).hex()}" for command in COMMANDS]
    lines += [f"{type(event).__name__} {wire.encode_envelope(wire.Envelope(4, [event])).hex()}" for event in EVENTS]
    kept = (Path(__file__).parent / "wire_bytes.txt").read_text().splitlines()
    assert lines == kept, "a layout changed: raise PROTOCOL_VERSION, and write the file anew"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x92\xa4Open\xa1x", b"\x91\x92\xa7Unknown\x01", b"\x80" * 50])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        wire.decode_commands(data)
    with pytest.raises(msgspec.MsgspecError):
        wire.decode_envelope(data)


def test_tokens_pack_and_unpack() -> None:
    assert list(unpack_tokens(pack_tokens([0, 2**31 - 1]))) == [0, 2**31 - 1]
    with pytest.raises(OverflowError):
        pack_tokens([2**31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"abc")


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(top_p=-0.1), "top_p"),
        (SamplingParams(top_k=-2), "top_k"),
        (SamplingParams(min_p=1.5), "min_p"),
        (SamplingParams(presence_penalty=3.0), "presence_penalty"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(seed=2**63), "seed"),
        (SamplingParams(logprobs=1000), "logprobs"),
        (SamplingParams(logit_bias={100: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={1: 101.0}), "logit_bias"),
        (SamplingParams(allowed_token_ids=[]), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=[-1]), "allowed_token_ids"),
        (SamplingParams(bad_words=[[]]), "bad_words"),
        (SamplingParams(bad_words=[[100]]), "bad_words"),
        (SamplingParams(bad_words=[[1] * 17] * 256), "bad_words"),
        (SamplingParams(bad_words=[[1] * 4097]), "bad_words"),
        (StopParams(max_tokens=0), "max_tokens"),
        (StopParams(min_tokens=-1), "min_tokens"),
        (StopParams(min_tokens=5, max_tokens=4), "min_tokens"),
        (StopParams(stop=[b""]), "stop"),
        (StopParams(stop=[b"x"] * 65), "stop"),
        (StopParams(stop_token_ids=[100]), "stop_token_ids"),
    ],
)
def test_parameters_out_of_range_name_their_field(params: SamplingParams | StopParams, field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        params.validate(vocab_size=100)
    assert caught.value.param == field
    assert field in caught.value.message


def test_more_tokens_than_the_vocabulary_are_refused_unread() -> None:
    for params in (SamplingParams(allowed_token_ids=[-1] * 101), StopParams(stop_token_ids=[-1] * 101)):
        with pytest.raises(errors.InvalidRequest, match="has 101 entries, at most 100"):
            params.validate(vocab_size=100)
    SamplingParams(allowed_token_ids=list(range(100)), bad_words=[[1] * 16] * 256).validate(vocab_size=100)
    StopParams(stop_token_ids=list(range(100))).validate(vocab_size=100)


@pytest.mark.parametrize("count", [True, False, 1.5, 2.0, "3", -1, 257])
def test_a_number_of_logprobs_is_an_int_in_range(count: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"top_logprobs must be .*between 0 and 256") as caught:
        check_logprobs(count, "top_logprobs")
    assert caught.value.param == "top_logprobs"
