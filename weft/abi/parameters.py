"""The parameters of generation: sampling, stopping, and what a generation reports it cost.

One table of names, defaults, ranges and descriptions. The typed classes that carry these fields stay handwritten:
`weft.core.sampling` in the engine, `weft.endpoints.schemas` over HTTP, `weft.sdk` in programs, `weft.llm` offline. They
take their ranges and descriptions from here, and `tests/abi/test_parameters.py` holds their names and defaults to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MAX_TOKENS = 2**31 - 1
"""Upper bound of any number of tokens: no sequence is longer."""
MAX_LOGPROBS = 256


class Parameter(NamedTuple):
    """One field of a request for generation."""

    name: str
    default: Any
    description: str
    low: int | None = None
    """Least value; None: not a number."""
    high: int | None = None
    low_open: bool = False
    """The least value itself is excluded."""
    neutral: tuple[Any, ...] = ()
    """Values that leave the model's own distribution as it is; empty: the default alone."""

    @property
    def range(self) -> str:
        """The range in interval notation, such as `(0, 1]`."""
        return f"{'(' if self.low_open else '['}{self.low}, {self.high}]"

    def contains(self, value: float) -> bool:
        """Whether a number is in range. Not-a-number never is."""
        if self.low is None or self.high is None:
            return True
        return self.low <= value <= self.high and not (self.low_open and value == self.low)


def _table(*parameters: Parameter) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in parameters}


SAMPLING = _table(
    Parameter("temperature", 1.0, "Sampling temperature, 0 to 10; 0 is greedy decoding.", 0, 10, neutral=(0.0, 1.0)),
    Parameter(
        "top_p",
        1.0,
        "Nucleus sampling: keep the most probable tokens with this total probability, 0 to 1; 0: only the first.",
        0,
        1,
    ),
    Parameter("top_k", 0, "Keep the k most probable tokens; 0 or -1: all.", -1, MAX_TOKENS, neutral=(0, -1)),
    Parameter("min_p", 0.0, "Drop tokens less probable than this share of the most probable one, 0 to 1.", 0, 1),
    Parameter("presence_penalty", 0.0, "Subtracted from the logit of each token in the output, -2 to 2.", -2, 2),
    Parameter("frequency_penalty", 0.0, "The same, times the token's count in the output, -2 to 2.", -2, 2),
    Parameter(
        "repetition_penalty",
        1.0,
        "Penalty on tokens of prompt and output, above 0, at most 10; 1: none.",
        0,
        10,
        low_open=True,
    ),
    Parameter("seed", None, "Seed of the request's random numbers, 64 bits; absent: random.", -(2**63), 2**63 - 1),
    Parameter("logit_bias", {}, "Token id to an addend of its logit, -100 to 100.", -100, 100),
    Parameter("allowed_token_ids", None, "Only these tokens may be sampled."),
    Parameter("bad_words", [], "Strings that are never generated, by their token sequences."),
    Parameter("logprobs", None, "Log-probabilities of the chosen and the k most probable tokens.", 0, MAX_LOGPROBS),
)
"""How the next token is drawn from the logits. Ranges of `logit_bias` are those of its values."""

STOP = _table(
    Parameter(
        "max_tokens", None, "Maximum number of output tokens; absent: as many as the context leaves.", 1, MAX_TOKENS
    ),
    Parameter("min_tokens", 0, "Minimum number of tokens before generation may stop.", 0, MAX_TOKENS),
    Parameter("stop", [], "Strings that end the text; not part of the text."),
    Parameter("stop_token_ids", [], "Tokens that end the text."),
    Parameter("ignore_eos", False, "Continue after end-of-sequence."),
)
"""When generation ends; the first condition that holds ends it."""

USAGE = _table(
    Parameter("num_prompt_tokens", 0, "Tokens that the sequence held when the operation began."),
    Parameter(
        "num_cached_tokens", 0, "Prompt tokens whose KV was found instead of computed, on the device or the host."
    ),
    Parameter("num_output_tokens", 0, "Tokens sampled."),
    Parameter("num_preemptions", 0, "How often the sequence lost its slot and pages to another."),
    Parameter("queued_s", 0.0, "Seconds from arrival to the first launch."),
    Parameter("first_token_s", 0.0, "Seconds from arrival to the first token."),
    Parameter("total_s", 0.0, "Seconds from arrival to the end."),
    Parameter("num_host_tokens", 0, "Of the cached tokens, those whose KV was brought from the host."),
    Parameter("num_recomputed_tokens", 0, "Prompt tokens computed again: their KV had existed and was given up."),
    Parameter(
        "first_different_token",
        None,
        "The first token that differs from the finished turn that the prompt continues; absent: none.",
    ),
    Parameter(
        "num_continued_tokens",
        0,
        "Of the cached tokens, those of KV that the sequence continues: its own, its parent's, or a finished turn's.",
    ),
    Parameter("num_prefill_tokens", 0, "Known tokens that went through a forward, recomputation included."),
)
"""What an operation cost, as the engine reports it to clients and programs."""
