"""`weft.LLM`: the offline API. Prompts in, results out, on an engine in this process.

Owns the engine, its runtime, and the thread of their event loop, so that it works in scripts, in notebooks (which have
a running loop) and from several threads. Bounds how many prompts are in progress. Requests go through the built-in
programs, as in the server.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, cast

from weft.abi.errors import WeftError
from weft.config import EMBEDDED_MODEL, ReasoningParserName, ServerConfig, ToolCallParserName
from weft.core.ids import pack_tokens, unpack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import EngineInfo, EngineStats
from weft.endpoints.dialect import Dialect, dialect_of
from weft.endpoints.models import ActiveModel, Models, ServedModel
from weft.engine.client import EngineClient
from weft.engine.inline import InlineEngine
from weft.hub import file_stamp, find_model
from weft.llm.bar import bar
from weft.llm.chats import ChatOptions, ChatPlan, TemplateOptions, chat_plan
from weft.llm.options import (
    Conversation,
    Extras,
    Options,
    Prompt,
    arguments,
    as_conversations,
    as_prompts,
    engine_config,
    least,
    packed_tokens,
)
from weft.llm.results import AnswerChunk, Result, answer, answer_chunks, complete, of_prompt, search
from weft.loop_thread import LoopThread, streamed, windowed
from weft.metrics import ModelMetrics
from weft.programs.builtin import beam, completion
from weft.programs.builtin.beam import BeamArgs
from weft.programs.types import Caller, Chunk, CompletionArgs
from weft.tokenizers.load import load_tokenizer
from weft.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.workflow.targets import WorkflowHost

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with (bytes of weights read, bytes to read) while a model loads."""


class LLM:
    """A model in this process, for offline use.

        with weft.LLM("weft-tiny") as llm:
            results = llm.chat([[{"role": "user", "content": "Tell me something interesting."}]], temperature=0)
            print(results[0].text)

    `options` are the fields of `weft.config.EngineConfig`. Methods may be called from several threads at once; calls
    share the engine's batches. Results do not depend on concurrent calls. `close` (or leaving the `with`) frees the
    model; so does interpreter exit.
    """

    def __init__(
        self,
        model: str = EMBEDDED_MODEL,
        *,
        load_progress: Progress | None = None,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
        **options: Any,
    ):
        """Load `model` (`weft-tiny`, a directory, a GGUF file, or a hub id). Returns when it is ready.

        `tool_call_parser` and `reasoning_parser` name the formats of tool calls and reasoning; auto: detected from the
        chat template. Raises `ModelLoadError` or `ConfigError`.
        """
        config = engine_config(model, options)
        tokenizer = load_tokenizer(
            config.model, config.revision, config.offline, generation_config=config.generation_config == "auto"
        )
        dialect = dialect_of(tokenizer, tool_call_parser, reasoning_parser)
        self._start(
            lambda: InlineEngine.from_config(config, load_progress, tokenizer=tokenizer),
            *(tokenizer, dialect, config.max_waiting, (config.model,)),
        )
        path = find_model(config.model, config.revision, files=(), offline=True)
        # Defaults of sampling and the longest answer are of the answer too, and so are the parsers of its text.
        settings = (
            config.quantized_blocks,
            config.generation_config,
            self.info.max_context,
            tool_call_parser,
            reasoning_parser,
        )
        stamp = f"{path.name} {file_stamp(path)} {self.info.dtype} {config.quantization}"
        self._weights = " ".join([stamp, *map(str, settings)])

    @classmethod
    def over(
        cls,
        connect: Callable[[], EngineClient],
        tokenizer: Tokenizer,
        *,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
    ) -> LLM:
        """An LLM on another kind of engine, which it then owns. `connect` is called on the event loop that uses it."""
        llm = cls.__new__(cls)
        llm._start(connect, tokenizer, dialect_of(tokenizer, tool_call_parser, reasoning_parser))
        llm._weights = f"{llm.info.model} {llm.info.dtype}"
        return llm

    def _start(
        self,
        connect: Callable[[], EngineClient],
        tokenizer: Tokenizer,
        dialect: Dialect,
        max_waiting: int = 4096,
        names: tuple[str, ...] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._dialect = dialect
        self._thread = LoopThread()
        self._engine = engine = list[EngineClient]()

        async def begin() -> tuple[ActiveModel, EngineInfo]:
            engine.append(connect())
            served = ServedModel(list(dict.fromkeys(["model", *names])), engine[0], tokenizer)
            config = ServerConfig(engine_wait_s=0.0)
            model = ActiveModel(served, config, dialect, ModelMetrics(), on_event=lambda event: None)
            return model, await engine[0].wait_ready()

        # Not a method: a reference to the object would keep it alive.
        self._finalizer = weakref.finalize(self, _close_unused, self._thread, engine)
        try:
            model, self.info = self._thread.run(begin())
        except BaseException:
            self.close()
            raise
        self._models = Models([model])
        self._runtime = model.runtime
        self._max_waiting = max_waiting

    def workflow_host(self) -> WorkflowHost:
        """Where the workflows that are given this object as `on` run: on its model and its event loop."""
        # Workflows need a database and an HTTP client, whose imports would take a fifth of the time to a first token.
        from weft.workflow.backend.endpoint import EndpointBackend, sources_of_models
        from weft.workflow.targets import WorkflowHost

        return WorkflowHost(
            self._thread,
            EndpointBackend(self._models),
            self._weights,
            sources_of_models(self._models, self._models[0].names[0]),
            tuple(self._models[0].names),
        )

    # ---- many prompts

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | None = None,
        stopping: StopParams | None = None,
        *,
        progress: bool | None = None,
        return_errors: bool = False,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Continue every prompt. Returns one result per prompt, in order.

        Prompts are strings or token ids, in any mixture; a single prompt gives a list of one result. `progress` shows a
        bar on standard error (None: only on a terminal). Raises the first error, which names its prompt; with
        `return_errors`, the prompt's result has it as `error` and the others continue.
        """
        items = as_prompts(prompts)
        results = self.generate_iter(items, sampling, stopping, return_errors=return_errors, **options)
        return _in_order(results, progress, _count(items))

    def generate_iter(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | None = None,
        stopping: StopParams | None = None,
        *,
        return_errors: bool = False,
        **options: Unpack[Options],
    ) -> Iterator[Result]:
        """Like `generate`, but yields results as they are ready (`Result.index` is the prompt's), and reads `prompts`
        only as fast as results are taken, so it may be endless. Leaving the loop early cancels running prompts."""
        template, extras = arguments(sampling, stopping, options, self.tokenizer.sampling_defaults)
        self._check(template)

        async def work(prompt: Prompt) -> tuple[bytes, Result]:
            packed = await self._tokens(prompt, extras)
            return packed, await complete(replace(template, prompt=packed), extras.caller, self._runtime)

        return self._all(as_prompts(prompts), work, template.n, return_errors)

    def chat(
        self,
        conversations: Conversation | Iterable[Conversation],
        sampling: SamplingParams | None = None,
        stopping: StopParams | None = None,
        *,
        progress: bool | None = None,
        return_errors: bool = False,
        template: TemplateOptions | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Result]:
        """The assistant's next turn of every conversation, rendered by the model's chat template.

        With `tools`, the model may call them: an output's `message` has its calls, content and reasoning, and its
        `finish_reason` is `tool_calls`. `response_format` restricts the content to a JSON schema. One conversation
        alone gives a list of one result. Otherwise as `generate`.
        """
        items = as_conversations(conversations)
        results = self.chat_iter(items, sampling, stopping, return_errors=return_errors, template=template, **options)
        return _in_order(results, progress, _count(items))

    def chat_iter(
        self,
        conversations: Iterable[Conversation],
        sampling: SamplingParams | None = None,
        stopping: StopParams | None = None,
        *,
        return_errors: bool = False,
        template: TemplateOptions | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[Result]:
        """The assistant's next turn of every conversation; yields results as `generate_iter` does."""
        plan = self._chat_plan(sampling, stopping, template, options)

        async def work(messages: Conversation) -> tuple[bytes, Result]:
            chat = await plan.of(messages, self.tokenizer)
            return chat.args.prompt, await answer(chat, plan.extras.caller, self._runtime)

        return self._all(as_conversations(conversations), work, plan.args.n, return_errors)

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        beam_width: int = 4,
        max_tokens: int = 16,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        ignore_eos: bool = False,
        progress: bool | None = None,
        return_errors: bool = False,
        add_special_tokens: bool = True,
    ) -> list[Result]:
        """The most probable continuations of every prompt: `beam_width` outputs each, by descending `score`.

        A score is the sum of a continuation's log-probabilities divided by its length to the power `length_penalty`.
        `early_stopping` says when a search with `beam_width` complete continuations ends. True: at once; False: when no
        other would be better at its present length; "never": when no other can become better at any length.
        """
        template = BeamArgs(
            prompt=pack_tokens([0]),
            width=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            ignore_eos=ignore_eos,
        )
        beam.check(replace(template, max_tokens=min(max_tokens, 1)), self.info)
        extras = Extras(Caller(), add_special_tokens)
        items = as_prompts(prompts)

        async def work(prompt: Prompt) -> tuple[bytes, Result]:
            packed = await self._tokens(prompt, extras)
            return packed, await search(replace(template, prompt=packed), extras.caller, self._runtime)

        return _in_order(self._all(items, work, beam_width, return_errors), progress, _count(items))

    # ---- one prompt, as it comes

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        stopping: StopParams | None = None,
        **options: Unpack[Options],
    ) -> Iterator[Chunk]:
        """Continue one prompt; yields chunks as they are computed. Leaving the loop early cancels the prompt."""
        args, extras = arguments(sampling, stopping, options, self.tokenizer.sampling_defaults)
        self._check(args)

        async def chunks() -> AsyncGenerator[Chunk, None]:
            whole = replace(args, prompt=await self._tokens(prompt, extras))
            async with aclosing(completion.main(whole, extras.caller, self._runtime)) as inner:
                async for chunk in inner:
                    yield chunk

        return streamed(self._thread, chunks)

    def stream_chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        stopping: StopParams | None = None,
        *,
        template: TemplateOptions | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[AnswerChunk]:
        """The assistant's next turn; yields chunks as they are computed. They have the model's raw text, and what it
        adds to the answer's content, reasoning and tool calls. Leaving the loop early cancels it."""
        plan = self._chat_plan(sampling, stopping, template, options)

        async def chunks() -> AsyncGenerator[AnswerChunk, None]:
            chat = await plan.of(messages, self.tokenizer)
            async with aclosing(answer_chunks(chat, plan.extras.caller, self._runtime)) as inner:
                async for chunk in inner:
                    yield chunk

        return streamed(self._thread, chunks)

    # ---- life

    def stats(self) -> EngineStats:
        """Current statistics of the engine."""
        return self._thread.run(self._runtime.engine.stats())

    def close(self) -> None:
        """Stop the engine and free the model. Running calls fail. Idempotent."""
        self._thread.check_elsewhere()
        if self._finalizer.detach() is not None:
            _close(self._thread, self._engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside

    def _check(self, args: CompletionArgs) -> None:
        """Raise errors that concern every prompt before the first one starts."""
        args.stop.validate(self.info.vocab_size)
        completion.check(replace(args, prompt=pack_tokens([0]), stop=least(args.stop)), self.info)

    def _chat_plan(
        self,
        sampling: SamplingParams | None,
        stopping: StopParams | None,
        template: TemplateOptions | None,
        options: ChatOptions,
    ) -> ChatPlan:
        plan = chat_plan(sampling, stopping, template, options, self._dialect, self.tokenizer.sampling_defaults)
        self._check(plan.args)
        return plan

    async def _tokens(self, prompt: Prompt, extras: Extras) -> bytes:
        if isinstance(prompt, str):
            return await self.tokenizer.encode_async(prompt, add_special_tokens=extras.add_special_tokens)
        return packed_tokens(prompt)

    def _all(
        self, items: Iterable[T], work: Callable[[T], Coroutine[Any, Any, tuple[bytes, Result]]], n: int,
        return_errors: bool,
    ) -> Iterator[Result]:  # fmt: skip
        """The results of `work` for every item, of `n` sequences each. `work` returns (packed prompt, result)."""

        async def one(index: int, item: T) -> Result:
            prompt = cast(Prompt, item)
            try:
                packed, gathered = await work(item)
            except WeftError as error:
                failure = of_prompt(index, error)
                if return_errors:
                    return Result(index=index, prompt=prompt, error=failure)
                raise failure from error
            return replace(gathered, index=index, prompt=prompt, prompt_token_ids=unpack_tokens(packed).tolist())

        # Enough to refill a batch whose sequences all end at once, and below the engine's limit of waiting operations.
        window = max(1, min(2 * self.info.max_running, self._max_waiting) // n)
        return windowed(self._thread, items, one, window)


def _close(thread: LoopThread, engine: list[EngineClient]) -> None:
    try:
        for client in engine:
            thread.run(client.close())
    finally:
        thread.stop()


def _close_unused(thread: LoopThread, engine: list[EngineClient]) -> None:
    """Finalizer of an LLM without references, also called at interpreter exit."""
    if threading.current_thread() is threading.main_thread():
        _close(thread, engine)
    else:
        # The garbage collector may run on the thread that `_close` would join.
        threading.Thread(target=_close, args=(thread, engine), name="weft-llm-close", daemon=True).start()


def _in_order(results: Iterator[Result], progress: bool | None, total: int | None) -> list[Result]:
    show = sys.stderr.isatty() if progress is None else progress
    with bar(total) if show else nullcontext(lambda result: None) as advance:
        collected = []
        for result in results:
            collected.append(result)
            advance(result)
    return sorted(collected, key=lambda result: result.index)


def _count(items: Iterable[object]) -> int | None:
    return len(items) if isinstance(items, Sequence) else None
