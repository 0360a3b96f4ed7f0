"""Converts a checked request to the arguments of a built-in program."""

from __future__ import annotations

import secrets

from weft.abi.errors import InvalidRequest
from weft.abi.parameters import SAMPLING
from weft.core.ids import unpack_tokens
from weft.core.sampling import MAX_BAD_WORDS, MAX_STOP_BYTES, SamplingParams, StopParams, check_logprobs
from weft.endpoints.models import ActiveModel
from weft.endpoints.schemas.common import GenerationRequest
from weft.programs.types import WHOLE_ANSWER, CompletionArgs
from weft.tokenizers.tokenizer import Tokenizer

SEED_BITS = 62
"""Bits of seeds drawn here, so that a seed plus the number of a choice fits in 64 bits."""


def completion_args(
    request: GenerationRequest,
    model: ActiveModel,
    prompts: list[bytes],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> list[CompletionArgs]:
    """The arguments of one program per prompt. Raises `InvalidRequest`, naming the field.

    A request without a seed gets a random one per prompt. With a seed, each prompt gives the same output as alone.
    """
    vocab_size = model.engine.info.vocab_size
    stop = _stop(request, max_tokens)
    stop.validate(vocab_size)
    if prompt_logprobs is not None:
        check_logprobs(prompt_logprobs, "prompt_logprobs")
    bad_words = _bad_words(request.bad_words, model.tokenizer)
    args: list[CompletionArgs] = []
    for prompt in prompts:
        seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
        sampling = _sampling(request, seed, bad_words, logprobs)
        if not args:
            sampling.validate(vocab_size)
        args.append(
            CompletionArgs(
                prompt=prompt,
                n=request.n,
                sampling=sampling,
                stop=stop,
                include_stop=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
                prompt_logprobs=prompt_logprobs,
                max_tokens=max_tokens,
                chunk_tokens=1 if request.stream else WHOLE_ANSWER,
            )
        )
    return args


def _sampling(
    request: GenerationRequest, seed: int, bad_words: list[list[int]], logprobs: int | None
) -> SamplingParams:
    plain = {name: getattr(request, name) for name in SAMPLING if name not in ("seed", "bad_words", "logprobs")}
    return SamplingParams(**plain, seed=seed, bad_words=bad_words, logprobs=logprobs)


def _stop(request: GenerationRequest, max_tokens: int | None) -> StopParams:
    texts = [request.stop] if isinstance(request.stop, str) else request.stop
    return StopParams(
        # The program itself handles max_tokens 0: it generates nothing.
        max_tokens=max_tokens or None,
        min_tokens=request.min_tokens,
        stop=[text.encode() for text in texts],
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
    )


def _bad_words(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The token sequences of each word at the beginning of a text and after a space."""
    if len(words) > MAX_BAD_WORDS // 2:
        raise InvalidRequest(f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS // 2}.", "bad_words")
    sequences: dict[bytes, None] = {}
    for word in words:
        if not 0 < len(word.strip()) <= len(word) <= MAX_STOP_BYTES:
            raise InvalidRequest(f"bad_words must have 1 to {MAX_STOP_BYTES} characters, not all spaces.", "bad_words")
        for text in (word, " " + word.lstrip()):
            sequences[tokenizer.encode(text, add_special_tokens=False)] = None
    return [list(unpack_tokens(packed)) for packed in sequences if packed]
