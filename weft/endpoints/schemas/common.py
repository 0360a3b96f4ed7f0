"""What several API families share: sampling fields, usage, stream options.

A request struct holds exactly the fields that have an effect; `weft.endpoints.fields` decides on all others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.abi.parameters import SAMPLING, STOP
from weft.core.objectives import MAX_DEADLINE_S, Objective

MAX_CHOICES = 128
"""Choices of one prompt, and prompts times choices of one request: bounds what a single request may ask for."""
MAX_SALT_CHARS = 256
MAX_SESSION_CHARS = 256
Json = dict[str, Any]
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _TOKENS,
        {"type": "array", "minItems": 1, "items": _TOKENS},
    ]
}
"""Of a `prompt` or `input`: one form or the other, not a mixture, which the field's type cannot say."""


# Fields that several requests have: of all, of those that compute, and of those that render a chat template.
ModelName = Annotated[str, Meta(description="A served name; may be left out when only one model is served.")]
Priority = Annotated[
    int, Meta(ge=-1000, le=1000, description="Lower runs earlier; a waiting request gains priority over time.")
]
SessionId = Annotated[
    str,
    Meta(
        max_length=MAX_SESSION_CHARS,
        description="Requests of one session stay together, where a model has several engines.",
    ),
]
Documents = Annotated[list[Json], Meta(description="Documents, for chat templates that use them.")]
AddGenerationPrompt = Annotated[
    bool, Meta(description="Open the assistant's turn at the end; absent: unless `continue_final_message`.")
]
ContinueFinalMessage = Annotated[bool, Meta(description="Continue the last message instead of starting a new one.")]
TemplateVariables = Annotated[Json, Meta(description="Additional variables for the chat template.")]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream is told."""

    include_usage: bool = False
    """One last chunk without choices carries `usage`."""
    continuous_usage_stats: bool = False
    """With `include_usage`: every chunk carries the usage so far."""
    include_obfuscation: bool = False
    """Accepted; chunks are never padded."""

    def __post_init__(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage to be true")


def _about(name: str) -> Meta:
    """Description and range of a parameter, for the schema. The engine checks the range, once for all ways in."""
    parameter = SAMPLING.get(name) or STOP[name]
    if parameter.low is None or name == "logit_bias":
        return Meta(description=parameter.description)
    least = "exclusiveMinimum" if parameter.low_open else "minimum"
    bounds = {least: parameter.low, "maximum": parameter.high}
    return Meta(description=parameter.description, extra_json_schema=bounds)


class GenerationRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of every request that generates text."""

    model: ModelName | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Choices per prompt; the prompt is computed once.")] = 1
    temperature: Annotated[float, _about("temperature")] = 1.0
    top_p: Annotated[float, _about("top_p")] = 1.0
    top_k: Annotated[int, _about("top_k")] = 0
    min_p: Annotated[float, _about("min_p")] = 0.0
    presence_penalty: Annotated[float, _about("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, _about("frequency_penalty")] = 0.0
    repetition_penalty: Annotated[float, _about("repetition_penalty")] = 1.0
    seed: (
        Annotated[
            int,
            _about("seed"),
        ]
        | None
    ) = None
    logit_bias: Annotated[dict[int, float], _about("logit_bias")] = {}
    allowed_token_ids: Annotated[list[int], _about("allowed_token_ids")] | None = None
    bad_words: Annotated[list[str], _about("bad_words")] = []
    stop: Annotated[str | list[str], _about("stop")] = []
    stop_token_ids: Annotated[list[int], _about("stop_token_ids")] = []
    include_stop_str_in_output: Annotated[bool, Meta(description="Include the stop string in the text.")] = False
    ignore_eos: Annotated[bool, _about("ignore_eos")] = False
    min_tokens: Annotated[int, _about("min_tokens")] = 0
    skip_special_tokens: Annotated[bool, Meta(description="Omit special tokens from the text.")] = True
    prompt_logprobs: (
        Annotated[
            int,
            Meta(
                extra_json_schema={"minimum": 0, "maximum": 256},
                description="The k most probable tokens at each prompt position. Not with `stream`.",
            ),
        ]
        | None
    ) = None
    return_token_ids: Annotated[bool, Meta(description="Adds `prompt_token_ids` and `token_ids`.")] = False
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(
                ge=-1,
                extra_json_schema={"not": {"const": 0}},
                description="Keep only the last k prompt tokens; -1: as many as fit beside `max_tokens`.",
            ),
        ]
        | None
    ) = None
    priority: Priority = 0
    objective: Annotated[
        Objective,
        Meta(
            description="What the request is to be fast at: `latency`, `ttft` (its first token), `throughput` (many "
            "requests together), `deadline` (done in `deadline_s`) or `batch` (at some time)."
        ),
    ] = "latency"
    deadline_s: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=MAX_DEADLINE_S,
                description="With `objective` `deadline`: in how many seconds the request should be done.",
            ),
        ]
        | None
    ) = None
    session_id: SessionId = ""
    cache_salt: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_SALT_CHARS,
                description="Requests share cached prefixes only with requests of the same key and salt.",
            ),
        ]
        | None
    ) = None
    response_format: (
        Annotated[Json, Meta(description='`{"type": "json_schema", "json_schema": …}`, `json_object` or `text`.')]
        | None
    ) = None
    structured_outputs: (
        Annotated[
            Json,
            Meta(
                description="Form of the text: one of `json`, `json_object`, `regex`, `choice`, `grammar`; "
                "with JSON also `whitespace_pattern` or `disable_any_whitespace`."
            ),
        ]
        | None
    ) = None
    guided_json: Annotated[Any, Meta(description="A JSON schema, as an object or a string, that the text follows.")] = (
        None
    )
    guided_regex: Annotated[str, Meta(description="A regular expression that matches the whole text.")] | None = None
    guided_choice: Annotated[list[str], Meta(description="The strings that the text may be.")] | None = None
    guided_whitespace_pattern: (
        Annotated[
            str,
            Meta(description="Regular expression for white space in JSON; absent: at most a space after `,` and `:`."),
        ]
        | None
    ) = None
    guided_grammar: Annotated[str, Meta(description="A grammar that the text follows, in Lark or GBNF.")] | None = None
    use_beam_search: Annotated[
        bool,
        Meta(description="Beam search instead of sampling: return the `n` best of `best_of` beams."),
    ] = False
    best_of: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_CHOICES,
                description="With `use_beam_search`: number of beams, at least `n`; absent: `n`. "
                "Otherwise it must equal `n`.",
            ),
        ]
        | None
    ) = None
    length_penalty: Annotated[
        float,
        Meta(
            description="-10 to 10. A beam's score is the sum of its log-probabilities divided by its length to this "
            "power."
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        Meta(
            description="When a search that has `best_of` complete beams ends. true: at once; false: when no other "
            'beam is better at its present length; "never": when no other beam can become better.'
        ),
    ] = False
    stream: Annotated[bool, Meta(description="Respond with server-sent events.")] = False
    stream_options: Annotated[
        StreamOptions | None, Meta(description="With `stream`: `include_usage`, and `continuous_usage_stats` with it.")
    ] = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompt's KV came from. `cached_tokens`, `recomputed_tokens` and `new_tokens` add up to its tokens."""

    cached_tokens: Annotated[
        int, Meta(description="Prompt tokens whose KV was found instead of computed, on the device or the host.")
    ] = 0
    continued_tokens: Annotated[
        int,
        Meta(
            description="Of the cached tokens, those of the finished turn that the prompt continues: its prompt, and "
            "its answer as far as the prompt has it."
        ),
    ] = 0
    host_tokens: Annotated[
        int, Meta(description="Of the cached tokens, those whose KV was brought back from the host.")
    ] = 0
    recomputed_tokens: Annotated[
        int, Meta(description="Prompt tokens computed again: their KV had existed and was given up to make room.")
    ] = 0
    new_tokens: Annotated[
        int,
        Meta(
            description="All others: computed for the first time, as far as the engine remembers what it gave up; and "
            "the last token of a prompt whose KV is all there, which is computed for what follows it."
        ),
    ] = 0
    first_different_token: (
        Annotated[
            int,
            Meta(
                description="Where the prompt continues a finished turn, the index of the first token that differs "
                "from that turn's: no KV from there on is found. null: the prompt has the whole turn, continues none, "
                "or shares later tokens with a request that is not a finished turn, or the request has several prompts."
            ),
        ]
        | None
    ) = None


class UsageInfo(msgspec.Struct, frozen=True):
    """Tokens of a request. The prompt counts once for all `n` choices.

    The details are absent in events of a stream that precede the end of a prompt's first choice: the engine reports
    them with that end.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET


class ChoiceDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice, or its part of a stream event, has only where the request asks for it."""

    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    cumulative_logprob: float | msgspec.UnsetType = msgspec.UNSET
    """Of a beam: of all its tokens together."""
    score: float | msgspec.UnsetType = msgspec.UNSET
    """Of a beam: what beams are ranked by."""


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at a prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token, candidates by token id; null for the first token, which nothing predicts."""
