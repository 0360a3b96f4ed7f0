"""From the arrays that a step brought back to a `StepResult`.

Samplers that asked for no log-probabilities get NaN, rank 0 and token -1 where others of the step asked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.step import NO_INTS, SamplingBatch, Step, StepResult, TopTokens

Arrays = dict[str, npt.NDArray[Any]]


def step_result(step: Step, arrays: Arrays, device_s: float) -> StepResult:
    """`arrays` are those of `StepRunner.sampling_half`, on the host."""
    logprobs = ranks = top = None
    if "logprobs" in arrays and step.sampling is not None:
        logprobs, ranks, top = _spread(step.sampling, arrays)
    return StepResult(
        step_id=step.step_id,
        tokens=arrays.get("tokens", NO_INTS),
        logprobs=logprobs,
        ranks=ranks,
        top=top,
        score_logprobs=arrays.get("score_logprobs"),
        score_ranks=arrays.get("score_ranks"),
        score_top=_top(arrays, "score_top"),
        dist=_top(arrays, "dist"),
        hidden_sums=arrays.get("hidden_sums"),
        device_s=device_s,
    )


def _spread(batch: SamplingBatch, arrays: Arrays) -> tuple[npt.NDArray[Any], npt.NDArray[Any], TopTokens]:
    """From the samplers that asked to all of them."""
    asked = batch.num_logprobs >= 0
    width = arrays["top_ids"].shape[1]
    logprobs = np.full(len(asked), np.nan, np.float32)
    ranks = np.zeros(len(asked), np.int32)
    top = TopTokens(np.full((len(asked), width), -1, np.int32), np.full((len(asked), width), np.nan, np.float32))
    logprobs[asked], ranks[asked] = arrays["logprobs"], arrays["ranks"]
    top.ids[asked], top.logprobs[asked] = arrays["top_ids"], arrays["top_logprobs"]
    return logprobs, ranks, top


def _top(arrays: Arrays, name: str) -> TopTokens | None:
    if f"{name}_ids" not in arrays:
        return None
    return TopTokens(arrays[f"{name}_ids"], arrays[f"{name}_logprobs"])
