"""Keyword options of the offline API, and their conversion to arguments of the built-in programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast, get_type_hints

import msgspec

from weft.abi.errors import ConfigError, InvalidRequest
from weft.config import EngineConfig
from weft.core.grammar import Grammar
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.programs.types import Caller, CompletionArgs

P = TypeVar("P", SamplingParams, StopParams)
Prompt = str | Sequence[int]
"""A text, or token ids."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages as in OpenAI's chat API."""


class Options(TypedDict, total=False):
    """Keyword options. Sampling and stopping fields override those of the given objects."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    logit_bias: dict[int, float]
    allowed_token_ids: list[int] | None
    logprobs: int | None
    max_tokens: int | None
    """None: as many as the context leaves. 0: compute the prompt alone (with `prompt_logprobs`)."""
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    n: int
    """Outputs per prompt; output i uses seed + i."""
    grammar: Grammar | None
    """Grammar of each output."""
    prompt_logprobs: int | None
    include_stop: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    """Add the model's special tokens to a text (often a beginning-of-sequence token)."""
    priority: int
    """Lower runs earlier."""
    namespace: str
    """Prompts of different namespaces share no KV."""


class Extras(msgspec.Struct, frozen=True):
    """Options that are not arguments of the program."""

    caller: Caller
    add_special_tokens: bool


_TYPES = get_type_hints(Options)


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an engine. Raises `ConfigError` with the option's name."""
    known = [name for name in EngineConfig.__struct_fields__ if name != "model"]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"LLM has no engine option {name!r}; {hint}")
    try:
        return msgspec.convert({"model": model, "performance_mode": "throughput", **options}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"an engine option cannot be used: {error}") from error


def arguments(
    sampling: SamplingParams | None,
    stopping: StopParams | None,
    options: Mapping[str, Any],
    defaults: Mapping[str, float],
    known: type = Options,
) -> tuple[CompletionArgs, Extras]:
    """The program's arguments without a prompt. `defaults` are those of the model: they hold where `sampling` is None,
    for parameters that `options` leaves out. Raises `InvalidRequest` for a keyword that is not in `Options`, proposing
    those of `known`, and for a type."""
    given: dict[str, Any] = dict(options)
    for name in given:
        if name not in Options.__annotations__:
            near = difflib.get_close_matches(name, known.__annotations__, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known.__annotations__)}"
            raise InvalidRequest(f"there is no option {name!r}; {hint}", name)
    if "stop" in given:
        texts = given["stop"]
        given["stop"] = [text.encode() for text in ([texts] if isinstance(texts, str) else texts)]
    prompt_alone = given.get("max_tokens") == 0
    if prompt_alone:
        given["max_tokens"] = None
    sampling = _with(sampling or msgspec.convert(defaults, SamplingParams), given)
    stopping = _with(stopping or StopParams(), given)
    given = {name: _typed(name, value) for name, value in given.items()}
    extras = Extras(
        Caller(priority=given.pop("priority", 0), namespace=given.pop("namespace", "")),
        given.pop("add_special_tokens", True),
    )
    args = CompletionArgs(
        prompt=b"",
        max_tokens=0 if prompt_alone else None,
        sampling=sampling,
        stop=stopping,
        **given,
    )
    return args, extras


def _typed(name: str, value: object) -> Any:
    """The value of an option that is no field of sampling or stopping, of its type in `Options`. The engine is in this
    process: nothing decodes the arguments again, and one of another type could end it."""
    if name == "grammar" and value is not None:
        return _typed_grammar(value)
    try:
        return msgspec.convert(value, _TYPES[name])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name} cannot be used: {error}", name) from error


def _typed_grammar(value: object) -> Grammar:
    """The grammar, with each of its fields checked: the constructors of `Grammar` and `Trigger` check no types."""
    if not isinstance(value, Grammar):
        raise InvalidRequest(
            f"grammar must be a Grammar, got {type(value).__name__}; make one with Grammar.regex, for example",
            "grammar",
        )
    try:
        plain = msgspec.convert(msgspec.to_builtins(value), Grammar)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"grammar cannot be used: {error}", "grammar") from error
    if plain != value:
        raise InvalidRequest("grammar cannot be used: reasoning of its Trigger must be a tuple of two str", "grammar")
    return value


def _with(params: P, given: dict[str, Any]) -> P:
    """`params` with its fields from `given`, which are removed there; types are checked."""
    fields = msgspec.structs.asdict(params)
    fields |= {name: given.pop(name) for name in list(given) if name in fields}
    try:
        return msgspec.convert(fields, type(params))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"an option cannot be used: {error}") from error


def least(stop: StopParams) -> StopParams:
    """The least that any prompt asks for, for a check before prompts are known; each prompt is checked again."""
    if stop.max_tokens is None or stop.max_tokens < 1:
        return stop
    return msgspec.structs.replace(stop, max_tokens=max(1, stop.min_tokens))


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> Iterable[Prompt]:
    """A single prompt becomes a list; a string is not an iterable of letters, nor are token ids prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes):
        raise InvalidRequest("a prompt is a str or token ids, not bytes; decode it first", "prompts")
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return cast(Iterable[Prompt], prompts)


def as_conversations(conversations: str | Conversation | Iterable[Conversation]) -> Iterable[Conversation]:
    """A single conversation becomes a list."""
    if isinstance(conversations, str):
        raise InvalidRequest("chat takes messages; pass text to generate", "conversations")
    if isinstance(conversations, Sequence) and conversations and isinstance(conversations[0], Mapping):
        return [cast(Conversation, conversations)]
    return cast(Iterable[Conversation], conversations)


def packed_tokens(tokens: Sequence[int]) -> bytes:
    """A prompt of token ids. Raises `InvalidRequest` for anything else."""
    try:
        return pack_tokens(tokens)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"a prompt is a str or a sequence of token ids: {error}", "prompt") from error
