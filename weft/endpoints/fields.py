"""The fields of requests: those with an effect, those accepted without one, and those refused.

A request's struct lists the fields with an effect. A field that would change the output and is not supported is refused
by name, unless its value has no effect. An advisory field is accepted. Any other field is refused with the nearest
names, because a misspelt field that is silently ignored changes results unnoticed. `null` means that a field is absent.
The same holds inside messages, tools and formats. A test compares `docs/api.md` with this file.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from weft.abi.errors import InvalidRequest, Unsupported
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.common import GenerationRequest
from weft.endpoints.schemas.completion import CompletionRequest
from weft.endpoints.schemas.embedding import EmbeddingRequest
from weft.endpoints.schemas.nested import NESTED_ADVISORY

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r"`\$\.?([^`]*)`")
_STEP = re.compile(r"\[[^]]*\]|[^.[]+")
"""Of a path: a field, or an item of a list or value of an object in brackets."""
NEVER: tuple[Any, ...] = ()


class Refusal(NamedTuple):
    """A field that is not supported: its values without an effect, and advice on what to use instead."""

    harmless: tuple[Any, ...]
    advice: str

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the field."""
        return {"enum": [None, *self.harmless], "description": f"Not supported. {self.advice}", "deprecated": True}


ADVISORY: dict[str, str] = {
    "metadata": "not stored",
    "prediction": "could only change speed",
    "prompt_cache_key": "the prefix index matches tokens",
    "prompt_cache_options": "the prefix index matches tokens",
    "prompt_cache_retention": "prefixes stay until they are evicted",
    "safety_identifier": "not stored",
    "service_tier": "there is one tier; use `priority`",
    "store": "responses are not stored",
    "user": "not stored",
}
"""Fields accepted in every request without an effect on the answer -> the reason."""


def advisory_schema(reason: str) -> dict[str, Any]:
    """JSON schema of a field that is accepted without an effect."""
    return {"description": f"Accepted without effect: {reason}."}


_COMPILER = "There is only one grammar backend; omit the field."

_GENERATION: dict[str, Refusal] = {
    "backend": Refusal(NEVER, _COMPILER),
    "guided_decoding_backend": Refusal(NEVER, _COMPILER),
    "kv_hints": Refusal(NEVER, "Cache hints are not in this release; prefixes are cached without them."),
    "kv_transfer_params": Refusal(NEVER, "KV transfer between servers is not in this release."),
    "logits_processors": Refusal(
        ([],), "Requests cannot contain code; use logit_bias, allowed_token_ids or bad_words."
    ),
    "lora_request": Refusal(NEVER, "Adapters are not in this release."),
    "repetition_detection": Refusal(NEVER, "Use stop or a penalty."),
    "request_id": Refusal(NEVER, "Send it as the X-Request-Id header."),
    "return_tokens_as_token_ids": Refusal((False,), "Use return_token_ids."),
    "spaces_between_special_tokens": Refusal((True,), "Special tokens are written as the tokenizer defines them."),
    "truncation_side": Refusal(("left",), "truncate_prompt_tokens keeps the end of a prompt."),
    "vllm_xargs": Refusal(({},), "There are no plug-ins."),
}

_CHAT: dict[str, Refusal] = _GENERATION | {
    "audio": Refusal(NEVER, "This server generates text only."),
    "chat_template": Refusal(NEVER, "Requests cannot contain code; the model's own template is used."),
    "echo": Refusal((False,), "Use /v1/completions to get the prompt in the response."),
    "function_call": Refusal(("none",), "Use tool_choice."),
    "include_reasoning": Refusal((True,), "Reasoning is in a separate field, which you can ignore."),
    "functions": Refusal(([],), "Use tools."),
    "mm_processor_kwargs": Refusal(({},), "This server reads text only."),
    "modalities": Refusal((["text"],), "This server generates text only."),
    "moderation": Refusal(NEVER, "This server has no moderation."),
    "thinking_token_budget": Refusal(NEVER, "Use max_tokens, which counts reasoning too."),
    "web_search_options": Refusal(NEVER, "This server does not search the web."),
}

_COMPLETION: dict[str, Refusal] = _GENERATION | {
    "messages": Refusal(NEVER, "Use /v1/chat/completions, or prompt."),
    "prompt_embeds": Refusal(NEVER, "Prompts are text or token ids."),
    "suffix": Refusal(("",), "Fill-in-the-middle is not in this release; write the model's markers in prompt."),
    "parallel_tool_calls": Refusal((True,), "Use /v1/chat/completions."),
    "tools": Refusal(([],), "Use /v1/chat/completions."),
}

_EMBEDDING: dict[str, Refusal] = {
    "messages": Refusal(NEVER, "Use input."),
    "task": Refusal(NEVER, "Write the instruction into input, as the model card describes."),
}

REFUSED: dict[type[msgspec.Struct], dict[str, Refusal]] = {
    ChatRequest: _CHAT,
    CompletionRequest: _COMPLETION,
    EmbeddingRequest: _EMBEDDING,
}


def is_field(kind: type[msgspec.Struct], name: str) -> bool:
    """Whether a request has a field of this name, be it one without an effect or one that is refused."""
    return name in kind.__struct_fields__ or name in REFUSED.get(kind, {}) or name in ADVISORY


def _no_defaults(model: Any) -> Mapping[str, float]:
    return {}


def request_from(kind: type[T], raw: Any, defaults_of: Callable[[Any], Mapping[str, float]] = _no_defaults) -> T:
    """Check a decoded JSON body and convert it. `defaults_of(model name)` gives values for fields that the body leaves
    out. Raises `InvalidRequest` or `Unsupported`, naming the field."""
    if not isinstance(raw, dict):
        raise InvalidRequest("The body must be a JSON object.")
    known = kind.__struct_fields__
    nullable = _nullable(kind)
    refused = REFUSED.get(kind, {})
    kept = {}
    for name, value in raw.items():
        if name in known:
            if value is not None or name in nullable:
                kept[name] = value
        elif name in refused:
            _check_harmless(name, value, refused[name])
        elif name not in ADVISORY:
            raise InvalidRequest(_unknown(name, name, (*known, *refused, *ADVISORY)), name[:100])
    if issubclass(kind, GenerationRequest) and not kept.get("use_beam_search"):
        # Beam search uses the model's own probabilities, so sampling defaults do not apply.
        kept = {**defaults_of(kept.get("model")), **kept}
    for name, shape in shapes_of(kind).items():
        value = kept.get(name)
        if value is not None:
            _check_inside(value, shape, name)
    try:
        return msgspec.convert(kept, kind, str_keys=True)
    except msgspec.ValidationError as error:
        message, param = _located(error)
        message = _with_key(message, param, kept, kind).removesuffix(".")
        raise InvalidRequest(f"{with_allowed(message, kind, param or '')}.", param) from None


def with_allowed(message: str, kind: Any, path: str) -> str:
    """A message of msgspec about the value at a path in an object of this type, such as `messages[0].role`; where the
    value is none of those that the type lists, with these."""
    if "Invalid enum value" not in message:
        return message
    found = [kind]
    for step in _STEP.findall(path):
        found = [inner for option in found for inner in _inside(option, step)]
    literals = [one for option in found for one in options_of(option) if get_origin(one) is Literal]
    allowed = [str(value) for literal in literals for value in get_args(literal)]
    return f"{message}; there are {', '.join(dict.fromkeys(allowed))}" if allowed else message


def _inside(kind: Any, step: str) -> Iterator[Any]:
    """The types of what is at a step within an object of a type: a field, an item or a value."""
    for option in options_of(kind):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            yield from [_hints(option)[step]] if step in _hints(option) else []
        elif step.startswith("[") and get_origin(option) in (dict, list, tuple):
            yield get_args(option)[1 if get_origin(option) is dict else 0]


def options_of(kind: Any) -> Iterator[Any]:
    """The types that a type is one of."""
    if get_origin(kind) is Annotated:
        yield from options_of(get_args(kind)[0])
    elif get_origin(kind) in (types.UnionType, Union):
        for option in get_args(kind):
            yield from options_of(option)
    else:
        yield kind


def shapes_of(kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Field of a request -> the shape of its value, for fields whose inner objects have fixed fields too."""
    return getattr(kind, "shapes", {})


@functools.cache
def _nullable(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The fields whose value may be null: required fields that take any JSON."""
    info = cast(msgspec.inspect.StructType, msgspec.inspect.type_info(kind))
    return frozenset(field.name for field in info.fields if field.required and _takes_any(field.type))


@functools.cache
def _hints(kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    """The types of a struct's fields. Evaluating them takes as long as generating several tokens."""
    return get_type_hints(kind)


def _takes_any(kind: msgspec.inspect.Type) -> bool:
    inner = kind.type if isinstance(kind, msgspec.inspect.Metadata) else kind
    return isinstance(inner, msgspec.inspect.AnyType)


def _with_key(message: str, param: str | None, kept: dict[str, Any], kind: type[msgspec.Struct]) -> str:
    """Add the first invalid key to a message about a field that maps keys to values: msgspec does not name it."""
    name = (param or "").partition("[")[0]
    hint = next((option for option in options_of(_hints(kind).get(name)) if get_origin(option) is dict), None)
    if hint is None or not isinstance(kept.get(name), dict):
        return message
    for key, value in kept[name].items():
        try:
            msgspec.convert({key: value}, hint, str_keys=True)
        except msgspec.ValidationError as error:
            what, _, where = str(error).replace("`", "").partition(" - at ")
            blamed = " has a key of the wrong type" if where.startswith("key") else ""
            return f"{name}[{msgspec.json.encode(key[:100]).decode()}]{blamed}: {what}."
    return message


def _check_harmless(name: str, value: Any, refusal: Refusal) -> None:
    # 1.0 equals a harmless 1, but true does not.
    kinds = ((harmless, isinstance(value, bool) == isinstance(harmless, bool)) for harmless in refusal.harmless)
    if value is None or any(same_kind and value == harmless for harmless, same_kind in kinds):
        return
    raise Unsupported(f"{name} is not supported. {refusal.advice}", name)


def _check_inside(value: Any, shape: Any, path: str) -> None:
    """Raise `InvalidRequest` for an unknown field of an object at any depth; `msgspec` finds all other errors."""
    origin = get_origin(shape)
    if origin in (types.UnionType, Union):
        for option in get_args(shape):
            _check_inside(value, option, path)
    elif origin is list and isinstance(value, list):
        for number, entry in enumerate(value):
            _check_inside(entry, get_args(shape)[0], f"{path}[{number}]")
    elif isinstance(shape, type) and origin is None and issubclass(shape, msgspec.Struct) and isinstance(value, dict):
        role, kind = _hints(shape).get("role"), _hints(shape).get("type")
        # A message has the shape of its role, and a part that of its type. Unknown ones are refused as such, not for
        # their fields.
        has_its_role = role is None or value.get("role") in get_args(role)
        if has_its_role and (get_origin(kind) is not Literal or value.get("type") in (None, *get_args(kind))):
            _check_object(value, shape, path)


def _check_object(value: dict[str, Any], shape: type[msgspec.Struct], path: str) -> None:
    hints = _hints(shape)
    advisory = NESTED_ADVISORY.get(shape, {})
    for name, inner in value.items():
        if inner is None or name in advisory:
            continue
        if name not in hints:
            place = f"{path}.{name[:100]}"
            raise InvalidRequest(_unknown(place, name, (*hints, *advisory)), place)
        _check_inside(inner, hints[name], f"{path}.{name}")


def _unknown(place: str, name: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name[:100], names, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else " See /docs for all fields."
    return f"Unknown field {place[:200]!r}.{hint}"


def _located(error: msgspec.ValidationError) -> tuple[str, str | None]:
    """Convert msgspec's "what - at `$.path`" to a message that begins with the field, and the field."""
    what, _, where = str(error).partition(" - at ")
    match = _PATH.search(where)
    path = match[1] if match is not None else ""
    if not path:
        missing = what.partition("required field ")[2].strip("`")
        return (f"{missing} is required.", missing) if missing else (what + ".", None)
    return f"{path}: {what.replace('`', '')}.", path
