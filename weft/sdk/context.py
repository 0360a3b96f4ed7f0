"""`Context`: a text that a model reads and goes on writing, with its KV.

    async with Context(system="You are brief.") as ctx:
        ctx.user("What is the capital of Peru?")
        reply = await ctx.generate(max_tokens=30)
        branches = [ctx.fork() for _ in range(3)]

What a program does with a text. How it becomes tokens on a sequence is `weft.sdk.token_buffer`. Both are written on the
traits Sequence, Tokenize and Store alone: whatever they do, a program can do otherwise.

Messages and texts are taken at once; they are rendered, tokenized and put on the sequence at the next `await`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from weft.abi.errors import InvalidRequest
from weft.sdk import context_store, tool_rounds
from weft.sdk.chat import Chat
from weft.sdk.generation import Generation
from weft.sdk.grammar import Grammar
from weft.sdk.model import own_model
from weft.sdk.sampling import Sampler, Stop, stopping
from weft.sdk.snapshot import Snapshot
from weft.sdk.token_buffer import TokenBuffer
from weft.sdk.toolbox import Tool, ToolCall, result_text, schemas


class Context(TokenBuffer):
    """A handle on a text and its KV.

    `tools`: functions or JSON schemas that the model is told of. `template`: further arguments of the chat template
    (`documents`, `chat_template`, `template_kwargs`). `sampler`: for generations that name none. `priority`: how early
    it runs; lower is earlier.
    """

    def __init__(
        self,
        system: str | None = None,
        *,
        tools: Iterable[Any] = (),
        sampler: Sampler | None = None,
        template: Mapping[str, Any] | None = None,
        priority: int = 0,
    ):
        plain, runnable = schemas(tools)
        super().__init__(Chat(tools=plain, template=dict(template or {})), priority)
        self.runnable_tools: list[Tool] = runnable
        self.sampler = sampler or Sampler()
        self.unanswered: dict[str, ToolCall] = {}
        """Calls of tools by id that wait for `tool`."""
        self.num_calls = 0
        """Calls of tools so far."""
        if system is not None:
            self.system(system)

    # ---- what the model reads

    def fill(self, text: str | Iterable[int]) -> Self:
        """Add text, or tokens. In a chat it is the beginning of the assistant's answer, or goes on with it."""
        self.put(text if isinstance(text, str) else list(text))
        return self

    def message(self, role: str, content: str | None, **fields: Any) -> Self:
        """Add a message. `fields` are further ones of OpenAI's form, such as `name`."""
        self.put({"role": role, "content": content, **fields})
        return self

    def system(self, text: str) -> Self:
        """Add a system message."""
        return self.message("system", text)

    def user(self, text: str) -> Self:
        """Add a user's message."""
        return self.message("user", text)

    def assistant(self, text: str) -> Self:
        """Add an answer that the model did not write."""
        return self.message("assistant", text)

    def tool(self, call: ToolCall, result: object) -> Self:
        """Add the result of a call: texts and answers of the web as they are, anything else as JSON."""
        self.unanswered.pop(call.id, None)
        return self.message("tool", result_text(result), tool_call_id=call.id, name=call.name)

    # ---- what the model writes

    def generate(
        self,
        sampler: Sampler | None = None,
        *,
        stop: Stop | str | Iterable[str] | None = None,
        max_tokens: int | None = None,
        grammar: Grammar | None = None,
        special: bool = False,
    ) -> Generation:
        """Have the model go on: iterate for pieces of text, or await all of it.

        What ends it (a stop string, a stop token, the end of sequence) is part of neither the text nor the context; in
        a chat the end of sequence stays, and ends the turn. `special`: the text has the names of special tokens in it.
        """
        self.sequence.check()
        return Generation(self, sampler or self.sampler, stopping(stop, max_tokens), grammar, special=special)

    async def generate_until(
        self,
        *,
        max_tokens: int | None = None,
        stop: Stop | str | Iterable[str] | None = None,
        sampler: Sampler | None = None,
        grammar: Grammar | None = None,
    ) -> str:
        """The text that the model writes until something in `stop` holds or there are `max_tokens`."""
        return (await self.generate(sampler, stop=stop, max_tokens=max_tokens, grammar=grammar)).text

    @property
    def last_text(self) -> str:
        """What the model wrote last, without its reasoning."""
        return "" if self.last is None else self.last.answer

    def tool_calls(
        self,
        max_rounds: int = 8,
        sampler: Sampler | None = None,
        *,
        max_tokens: int | None = None,
        parser: str | None = None,
    ) -> AsyncIterator[ToolCall]:
        """Generate until the model calls tools, yield each call as soon as it is complete, and go on once all have
        their result (`tool`), until an answer has no calls. See `weft.sdk.tool_rounds`."""
        return tool_rounds.tool_calls(self, max_rounds, sampler, max_tokens, parser)

    async def run_tools(
        self,
        max_rounds: int = 8,
        sampler: Sampler | None = None,
        *,
        max_tokens: int | None = None,
        parser: str | None = None,
    ) -> str:
        """The same, with the functions in `tools` called, each as soon as its call is complete; the last answer."""
        return await tool_rounds.run_tools(self, max_rounds, sampler, max_tokens=max_tokens, parser=parser)

    # ---- branches and ways back

    def fork(self) -> Context:
        """Another context that goes on from here by itself and shares all KV with this one."""
        self.sequence.check()
        twin = Context.__new__(Context)
        TokenBuffer.__init__(twin, self.chat.copy(), self.priority, parent=self)
        twin.runnable_tools, twin.sampler = self.runnable_tools, self.sampler
        twin.unanswered, twin.num_calls = dict(self.unanswered), self.num_calls
        self.branch(twin)
        return twin

    async def join(self, child: Context) -> None:
        """Go on where another context is, usually a fork of this one, and give that one back."""
        if child is self:
            return
        await self.flush()
        await child.flush()
        self.sequence.release()
        self.sequence = child.sequence.fork()
        self.tokens, self.chat, self.base = list(child.tokens), child.chat.copy(), child.base
        self.masks = list(child.masks)
        self.last, self.pending, self.is_dirty = child.last, [], False
        self.unanswered, self.num_calls = dict(child.unanswered), child.num_calls
        self.usage += child.usage
        child.drop()

    async def snapshot(self) -> Snapshot:
        """The state as it is now, as a value: for `rewind`, for `Context.restored`, or as JSON."""
        await self.flush()
        model = await own_model()
        return Snapshot(model.name, tuple(self.tokens), self.base, self.chat.copy(), tuple(self.masks))

    async def rewind(self, to: Snapshot) -> None:
        """Back to an earlier state, or on to a later one. What both have in common keeps its KV."""
        if any(isinstance(item, TokenBuffer) for item in self.pending):
            await self.flush()
        await self.settle()
        to.check(await own_model())
        self.become(to.tokens, list(to.masks))
        self.chat, self.base = to.chat.copy(), to.base
        self.pending, self.is_dirty = [], False
        self.unanswered.clear()

    async def rewind_turns(self, turns: int = 1) -> None:
        """Forget the last messages of users, and all that followed each."""
        await self.flush()
        places = [at for at, message in enumerate(self.chat.messages) if message["role"] == "user"]
        if not 1 <= turns <= len(places):
            raise InvalidRequest(f"the chat has {len(places)} turns of users; {turns} cannot be forgotten", "turns")
        self.unanswered.clear()
        self.chat.cut(places[-turns])
        if self.chat.messages:
            self.is_dirty = True
        else:
            self.edit(self.base, [])

    async def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens only. A chat is no chat afterwards: what remains of it is text to go on from."""
        await self.flush()
        if not 0 <= num_tokens <= len(self.tokens):
            raise InvalidRequest(
                f"the context has {len(self.tokens)} tokens and cannot keep {num_tokens}", "num_tokens"
            )
        self.edit(num_tokens, [])
        self.chat = Chat(tools=self.chat.tools, template=self.chat.template)
        self.base = num_tokens

    async def mask(self, *ranges: tuple[int, int]) -> None:
        """Hide ranges of tokens (first, past the last) from all that follows, instead of those hidden before; without
        ranges, show everything again. The tokens keep their positions, and cost nothing to hide.

        What follows is this context's own: it is neither found nor shared by others that begin with the same tokens.
        """
        await self.flush()
        if any(not 0 <= first <= last <= len(self.tokens) for first, last in ranges):
            raise InvalidRequest(f"{ranges} are not among the {len(self.tokens)} tokens of the context", "ranges")
        self.hide(tuple((first, last) for first, last in ranges))

    # ---- across failures, runs and programs

    async def restore(self, timeout_s: float = 60.0) -> None:
        """After `EngineDead`: the same tokens on a new sequence, computed again. Waits until the engine is back."""
        await context_store.restore(self, timeout_s)

    @classmethod
    async def restored(cls, snapshot: Snapshot, **options: Any) -> Context:
        """A new context in the state of a snapshot. `options` as for `Context`; tools come from the snapshot."""
        snapshot.check(await own_model())
        ctx = cls(**options)
        await ctx.rewind(snapshot)
        return ctx

    async def save(self, name: str) -> None:
        """Keep it under a name, for this tenant's programs, durably: tokens, messages, and the model they belong to."""
        await context_store.save(self, name)

    @classmethod
    async def open(cls, name: str, **options: Any) -> Context:
        """A context that was saved. Raises `UnknownHandle` for a name that is none and `InvalidRequest` for one that
        belongs to another model. Its KV is found if it is still there, else computed again."""
        return await cls.restored(await context_store.load(name), **options)

    def hold(self, seconds: float) -> None:
        """Give it back, and have its KV kept a while for whoever begins with the same tokens."""
        if self.parent is None:
            self.sequence.hold(seconds)
        else:
            self.sequence.close()

    def drop(self) -> None:
        """Give it back. Does nothing the second time."""
        self.give_back()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
