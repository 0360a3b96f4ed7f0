"""Beam search in requests: `use_beam_search` and the fields that go with it.

Owns the list of fields that beam search supports. Any other field that would change the answer is refused by name. The
search itself is `weft.programs.builtin.beam`.
"""

from __future__ import annotations

from typing import Any

from weft.abi.errors import InvalidRequest, Unsupported
from weft.abi.parameters import SAMPLING
from weft.core.ids import TOKEN_BYTES
from weft.endpoints.models import ActiveModel
from weft.endpoints.schemas.common import GenerationRequest
from weft.programs.builtin import beam
from weft.programs.builtin.beam import BeamArgs
from weft.sdk.beam_rules import MAX_WIDTH

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{p.name: p.neutral or (p.default,) for p in SAMPLING.values() if p.name not in ("seed", "logprobs")},
    "stop": ([],),
    "prompt_logprobs": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_whitespace_pattern": (None,),
}
"""Fields that beam search does not support -> their values without an effect, which are accepted."""


def check_beams(body: GenerationRequest) -> None:
    """Raise `InvalidRequest`, naming the fields, for fields that exclude beam search, or that need it and lack it."""
    if not body.use_beam_search:
        _check_sampling(body)
        return
    wrong = [name for name, harmless in NEUTRAL.items() if getattr(body, name) not in harmless]
    if wrong:
        raise Unsupported(
            f"{' and '.join(wrong)} cannot be combined with use_beam_search, which follows the model's own "
            "probabilities; leave one or the other out.",
            wrong[0],
        )
    if num_beams(body) < body.n:
        raise InvalidRequest(f"best_of is {body.best_of}, fewer beams than n asks for, {body.n}.", "best_of")
    if num_beams(body) > MAX_WIDTH:
        raise InvalidRequest(
            f"{_width_field(body)} is {num_beams(body)}; a search follows at most {MAX_WIDTH} beams.",
            _width_field(body),
        )


def num_beams(body: GenerationRequest) -> int:
    """Number of sequences that one prompt of the request takes."""
    return body.n if body.best_of is None or not body.use_beam_search else body.best_of


def beam_args(
    body: GenerationRequest,
    model: ActiveModel,
    prompts: list[bytes],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    skip_special_tokens: bool,
) -> list[BeamArgs]:
    """The arguments of one search per prompt. Raises `InvalidRequest`, naming the field."""
    args = [
        BeamArgs(
            prompt=prompt,
            width=num_beams(body),
            n=body.n,
            max_tokens=model.max_context - len(prompt) // TOKEN_BYTES if max_tokens is None else max_tokens,
            min_tokens=body.min_tokens,
            length_penalty=body.length_penalty,
            early_stopping=body.early_stopping,
            ignore_eos=body.ignore_eos,
            stop_token_ids=tuple(body.stop_token_ids),
            logprobs=logprobs,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=skip_special_tokens,
        )
        for prompt in prompts
    ]
    try:
        beam.check(args[0], model.engine.info)
    except InvalidRequest as error:
        if error.param != "beam_width":
            raise
        raise InvalidRequest(f"{_width_field(body)}: {error.message}.", _width_field(body)) from error
    return args


def _check_sampling(body: GenerationRequest) -> None:
    if body.best_of is not None and body.best_of != body.n:
        raise Unsupported(
            f"best_of {body.best_of} differs from n: choosing among more samples than are returned is only done by "
            "use_beam_search. Leave best_of out.",
            "best_of",
        )
    given = {"length_penalty": body.length_penalty != 1, "early_stopping": body.early_stopping is not False}
    for name in (name for name, is_given in given.items() if is_given):
        raise InvalidRequest(f"{name} is about beams, and use_beam_search is not set.", name)


def _width_field(body: GenerationRequest) -> str:
    return "n" if body.best_of is None else "best_of"
