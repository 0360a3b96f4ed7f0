"""What the offline API gives back, and how chunks become it."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field

from weft.abi.errors import WeftError, from_kind
from weft.core.wire import FinishReason, TokenLogprobs, Usage
from weft.llm.options import Conversation, Prompt
from weft.programs.builtin import beam, completion
from weft.programs.builtin.beam import BeamArgs
from weft.programs.runtime import Runtime
from weft.programs.types import Caller, Chunk, CompletionArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop: str | int | None = None
    """The stop string or stop token that ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token, where asked for."""
    usage: Usage = field(default_factory=Usage)
    score: float | None = None
    """Of a beam: what beams are ranked by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one prompt: `outputs`, or an `error` where errors are returned."""

    index: int
    """Its place among the prompts given."""
    prompt: Prompt | Conversation
    """As given."""
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token, None for the first; where asked for."""
    error: WeftError | None = None

    @property
    def text(self) -> str:
        """The first output's text. Raises the prompt's error where it has one."""
        return self._first.text

    @property
    def token_ids(self) -> list[int]:
        """The first output's tokens. Raises the prompt's error where it has one."""
        return self._first.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first output ended. Raises the prompt's error where it has one."""
        return self._first.finish_reason

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found instead of computed."""
        return self.outputs[0].usage.num_cached_tokens if self.outputs else 0

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of all outputs."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def _first(self) -> Output:
        if self.error is not None:
            raise self.error
        return self.outputs[0]


async def gather(args: CompletionArgs, caller: Caller, runtime: Runtime) -> Result:
    """All chunks of a completion, as a result without its prompt."""
    texts: list[list[str]] = [[] for _ in range(args.n)]
    tokens: list[list[int]] = [[] for _ in range(args.n)]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in range(args.n)]
    last: dict[int, Chunk] = {}
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    async with aclosing(completion.main(args, caller, runtime)) as chunks:
        async for chunk in chunks:
            texts[chunk.index].append(chunk.text)
            tokens[chunk.index] += chunk.tokens
            logprobs[chunk.index] += chunk.logprobs
            if chunk.prompt_logprobs is not None:
                prompt_logprobs = list(chunk.prompt_logprobs)
            if chunk.finish_reason is not None:
                last[chunk.index] = chunk
    outputs = [
        Output(
            index=index,
            text="".join(texts[index]),
            token_ids=tokens[index],
            finish_reason=last[index].finish_reason,
            stop=last[index].stop,
            logprobs=None if args.sampling.logprobs is None else logprobs[index],
            usage=last[index].usage or Usage(),
        )
        for index in range(args.n)
    ]
    return Result(index=0, prompt=[], outputs=outputs, prompt_logprobs=prompt_logprobs)


async def search(args: BeamArgs, caller: Caller, runtime: Runtime) -> Result:
    """The beams of a prompt as outputs, best first, as a result without its prompt."""
    async with aclosing(beam.chunks(args, caller, runtime)) as chunks:
        outputs = [
            Output(
                index=chunk.index,
                text=chunk.text,
                token_ids=list(chunk.tokens),
                finish_reason=chunk.finish_reason,
                stop=chunk.stop,
                logprobs=None if args.logprobs is None else list(chunk.logprobs),
                usage=chunk.usage or Usage(),
                score=None if chunk.score is None else chunk.score.score,
            )
            async for chunk in chunks
        ]
    return Result(index=0, prompt=[], outputs=outputs)


def of_prompt(index: int, error: WeftError) -> WeftError:
    """The same error, saying which prompt it is of."""
    message = f"prompt {index}: {error.message}"
    return from_kind(error.kind, message, param=error.param, retry_after_s=error.retry_after_s)
