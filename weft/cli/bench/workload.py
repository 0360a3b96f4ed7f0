"""Requests and their arrival times: prompts of random tokens or words, Poisson arrivals, files of prompts.

The same seed gives the same requests.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from weft.abi.errors import WeftError
from weft.cli.bench.lengths import Lengths

FIRST_TOKEN, LAST_TOKEN = 100, 1000
"""Range of ids for random prompts: ordinary tokens in all common vocabularies."""
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back
"""
WORDS = tuple(_WORDS.split())
"""Short English words, one token each in most vocabularies."""

Message = dict[str, str]
Prompt = list[int] | str | list[Message]
"""Token ids or a text for `/v1/completions`; messages, or a text as one, for `/v1/chat/completions`."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to a server."""

    prompt: Prompt
    output_len: int
    """Tokens requested; the answer has as many if end-of-sequence is ignored."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Other fields of its body."""

    @property
    def endpoint(self) -> str | None:
        """The endpoint that accepts such a prompt; None: both."""
        if isinstance(self.prompt, str):
            return None
        return "chat" if isinstance(self.prompt[0], dict) else "completions"


def random_prompts(
    seed: int, tokens: Sequence[int], *, count: int, lengths: Lengths, shared_prefix: int = 0
) -> list[list[int]]:
    """`count` prompts drawn from `tokens`; their first `shared_prefix` tokens, which `lengths` count, are the same.

    Every prompt has at least one token of its own, and the first token after the prefix differs, as far as there are
    enough tokens. Raises `typer.BadParameter` if the prefix is not shorter than the prompts.
    """
    check_prefix(lengths, shared_prefix)
    draw = random.Random(f"prompts {seed}")  # a string, because the sign of an integer seed is ignored
    prefix = draw.choices(tokens, k=shared_prefix)
    firsts = draw.sample(tokens, k=len(tokens))
    prompts = []
    for index in range(count):
        rest = _own(lengths, shared_prefix, draw) - 1
        prompts.append([*prefix, firsts[index % len(firsts)], *draw.choices(tokens, k=rest)])
    return prompts


def check_prefix(lengths: Lengths, shared_prefix: int) -> None:
    """Raise `typer.BadParameter` for a prefix that is not shorter than the prompts."""
    if shared_prefix >= lengths.first:
        raise typer.BadParameter(f"--shared-prefix-len {shared_prefix} must be less than --input-len {lengths}")


def _own(lengths: Lengths, shared_prefix: int, source: random.Random) -> int:
    return max(1, lengths.draw(source) - shared_prefix)


def random_requests(
    seed: int, *, count: int, inputs: Lengths, outputs: Lengths, shared_prefix: int = 0, as_text: bool = False
) -> list[BenchRequest]:
    """Requests of random lengths. `inputs` count the shared prefix, after which at least one token differs.

    `as_text`: words instead of token ids, so lengths are approximate.
    """
    draw = random.Random(f"requests {seed}")
    prefix = filler(draw, shared_prefix, as_text)
    requests = []
    for _ in range(count):
        own = filler(draw, _own(inputs, shared_prefix, draw), as_text)
        requests.append(BenchRequest(joined(prefix, own), outputs.draw(draw)))
    return requests


def filler(source: random.Random, length: int, as_text: bool) -> list[int] | str:
    """Draw `length` random tokens, or words."""
    if as_text:
        return " ".join(source.choices(WORDS, k=length))
    return source.choices(range(FIRST_TOKEN, LAST_TOKEN), k=length)


def joined(first: list[int] | str, second: list[int] | str) -> list[int] | str:
    """Concatenate two prompts of the same kind."""
    if isinstance(first, str) or isinstance(second, str):
        return f"{first} {second}".strip()
    return first + second


def parse_window(text: str) -> tuple[float, float]:
    """`BEGIN:END`, in seconds. Raises `ValueError`."""
    begin, _, end = text.partition(":")
    try:
        span = float(begin), float(end)
    except ValueError:
        raise ValueError(f"{text!r} is not a window; write BEGIN:END in seconds, as in 100:140") from None
    if not 0 <= span[0] < span[1] < math.inf:
        raise ValueError(f"the window {text!r} needs 0 <= BEGIN < END")
    return span


def arrivals(seed: int, count: int, rate: float) -> Iterator[float]:
    """When each request arrives, in seconds from the start: a Poisson process of `rate` per second, `inf`: all at once.

    The first one arrives at 0.
    """
    draw = random.Random(f"arrivals {seed}")
    at = 0.0
    for _ in range(count):
        yield at
        at += draw.expovariate(rate) if math.isfinite(rate) else 0.0


def parse_rate(text: str) -> float:
    """Requests per second, or `inf`. Raises `ValueError`."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"{text!r} is not a rate; give requests per second, or inf for all at once")
    return rate


def read_requests(file: Path, outputs: Lengths, seed: int) -> list[BenchRequest]:
    """Read the requests of a JSON-lines file, skipping empty lines.

    A line has `prompt` (a string or token ids) or `messages`; its `max_tokens` (or `max_completion_tokens`) overrides
    `outputs`, and its other fields are sent unchanged, except `model` and `stream`. Lines of OpenAI's batch files, with
    a `body`, are accepted too. Raises `WeftError` that names the line.
    """
    draw = random.Random(f"file {seed}")
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WeftError(f"{file} cannot be read: {error}") from error
    requests = [_read_line(file, number, line, outputs, draw) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise WeftError(f"{file} has no requests; write one JSON object per line, with a prompt or messages")
    return requests


def _read_line(file: Path, number: int, line: str, outputs: Lengths, draw: random.Random) -> BenchRequest:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise WeftError(f"line {number} of {file} is not valid JSON: {error}") from error
    body = dict(row.get("body", row)) if isinstance(row, dict) and isinstance(row.get("body", row), dict) else {}
    prompts = [body.pop(name) for name in ("prompt", "messages") if name in body]
    if len(prompts) != 1 or not prompts[0] or not isinstance(prompts[0], str | list):
        raise WeftError(f"line {number} of {file} needs either a prompt or messages")
    lengths = [body.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in body]
    output_len = lengths[0] if lengths else outputs.draw(draw)
    if isinstance(output_len, bool) or not isinstance(output_len, int) or output_len < 1:
        raise WeftError(f"line {number} of {file} asks for {output_len!r} tokens; max_tokens is a positive number")
    fields = {name: body[name] for name in body if name not in ("model", "stream", "stream_options", "custom_id")}
    return BenchRequest(prompts[0], output_len, fields)
