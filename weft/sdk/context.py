"""`Context`: a text that a model reads and continues, with its KV.

    async with Context(system="You are brief.") as ctx:
        ctx.user("What is the capital of Peru?")
        reply = await ctx.generate(max_tokens=30)
        branches = [ctx.fork() for _ in range(3)]

`weft.sdk.token_buffer` turns text and messages into tokens of a sequence. Both modules use only the traits Sequence,
Tokenize and Store, so a program can replace all that they do.

Messages and texts are queued at once; they are rendered, tokenized and appended to the sequence at the next `await`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Self

from weft.abi.errors import InvalidRequest
from weft.sdk import context_store, tool_rounds
from weft.sdk.channel import Scoped
from weft.sdk.chat import Chat
from weft.sdk.generation import Generation
from weft.sdk.grammar import Grammar
from weft.sdk.model import own_model
from weft.sdk.sampling import Sampler, Stop, stopping
from weft.sdk.snapshot import Snapshot
from weft.sdk.token_buffer import TokenBuffer
from weft.sdk.toolbox import Tool, ToolCall, result_text, schemas


class Context(TokenBuffer, Scoped):
    """A handle on a text and its KV.

    `tools`: functions or JSON schemas offered to the model. `template`: further arguments of the chat template
    (`documents`, `chat_template`, `template_kwargs`). `sampler`: default of its generations. `priority`: lower runs
    earlier.
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
        """Id -> tool call that has no result yet; `tool` gives the result."""
        self.num_calls = 0
        """Number of tool calls that the model has made."""
        if system is not None:
            self.system(system)

    # Input of the model

    def fill(self, text: str | Iterable[int]) -> Self:
        """Add text or tokens. In a chat they begin or continue the assistant's answer."""
        self.put(text if isinstance(text, str) else list(text))
        return self

    def message(self, role: str, content: str | None, **fields: Any) -> Self:
        """Add a message. `fields` are further fields of OpenAI's chat format, such as `name`."""
        self.put({"role": role, "content": content, **fields})
        return self

    def system(self, text: str) -> Self:
        """Add a message of the role `system`."""
        return self.message("system", text)

    def user(self, text: str) -> Self:
        """Add a message of the role `user`."""
        return self.message("user", text)

    def assistant(self, text: str) -> Self:
        """Add an answer of the assistant that the model did not generate."""
        return self.message("assistant", text)

    def tool(self, call: ToolCall, result: object) -> Self:
        """Add the result of a tool call: text and HTTP responses as text, other values as JSON."""
        self.unanswered.pop(call.id, None)
        return self.message("tool", result_text(result), tool_call_id=call.id, name=call.name)

    # Output of the model

    def generate(
        self,
        sampler: Sampler | None = None,
        *,
        stop: Stop | str | Iterable[str] | None = None,
        max_tokens: int | None = None,
        grammar: Grammar | None = None,
        special: bool = False,
    ) -> Generation:
        """Generate: iterate over the result for pieces of text, or await it for the whole.

        The stop string, stop token or end of sequence that ends it belongs neither to the text nor to the context; in a
        chat the end of sequence stays in the context and ends the turn. `special`: the text contains the names of
        special tokens.
        """
        self.check()
        return Generation(self, sampler or self.sampler, stopping(stop, max_tokens), grammar, special=special)

    async def generate_until(
        self,
        *,
        max_tokens: int | None = None,
        stop: Stop | str | Iterable[str] | None = None,
        sampler: Sampler | None = None,
        grammar: Grammar | None = None,
    ) -> str:
        """Generate until a condition of `stop` holds or there are `max_tokens` tokens, and return the text."""
        return (await self.generate(sampler, stop=stop, max_tokens=max_tokens, grammar=grammar)).text

    @property
    def last_text(self) -> str:
        """The last generated text, without its reasoning."""
        return "" if self.last is None else self.last.answer

    def tool_calls(
        self,
        max_rounds: int = 8,
        sampler: Sampler | None = None,
        *,
        max_tokens: int | None = None,
        parser: str | None = None,
    ) -> AsyncIterator[ToolCall]:
        """Generate until the model calls tools, yield each call as soon as it is complete, and continue once every call
        has its result (`tool`), until an answer has no calls.

        Raises `Unsupported` for a model that was not trained to call tools, `InvalidRequest` for a call left without a
        result, `LimitExceeded` if the model still calls tools after `max_rounds` rounds.
        """
        return tool_rounds.tool_calls(self, max_rounds, sampler, max_tokens, parser)

    async def run_tools(
        self,
        max_rounds: int = 8,
        sampler: Sampler | None = None,
        *,
        max_tokens: int | None = None,
        parser: str | None = None,
    ) -> str:
        """Like `tool_calls`, but run the functions in `tools`, each as soon as its call is complete. Returns the last
        answer."""
        return await tool_rounds.run_tools(self, max_rounds, sampler, max_tokens=max_tokens, parser=parser)

    # Branches and rewinding

    def fork(self) -> Context:
        """An independent context that continues from here and shares all KV with this one."""
        self.check()
        twin = Context.__new__(Context)
        TokenBuffer.__init__(twin, self.chat.copy(), self.priority, parent=self)
        twin.runnable_tools, twin.sampler = self.runnable_tools, self.sampler
        twin.unanswered, twin.num_calls = dict(self.unanswered), self.num_calls
        self.branch(twin)
        return twin

    async def join(self, child: Context) -> None:
        """Continue from the state of another context, usually a fork of this one, and release that one."""
        if child is self:
            return
        await self.flush()
        await child.flush()
        self.replace_sequence(child.sequence.fork())
        self.tokens, self.chat, self.base = list(child.tokens), child.chat.copy(), child.base
        self.masks = list(child.masks)
        self.last, self.pending, self.is_dirty = child.last, [], False
        self.unanswered, self.num_calls = dict(child.unanswered), child.num_calls
        self.usage += child.usage
        child.drop()

    async def snapshot(self) -> Snapshot:
        """The present state as a value, for `rewind`, `Context.restored` or JSON."""
        await self.flush()
        model = await own_model()
        return Snapshot(model.name, tuple(self.tokens), self.base, self.chat.copy(), tuple(self.masks))

    async def rewind(self, to: Snapshot) -> None:
        """Return to an earlier state, or go to a later one. The common prefix keeps its KV."""
        if any(isinstance(item, TokenBuffer) for item in self.pending):
            await self.flush()
        await self.settle()
        to.check(await own_model())
        self.become(to.tokens, list(to.masks))
        self.chat, self.base = to.chat.copy(), to.base
        self.pending, self.is_dirty = [], False
        self.unanswered.clear()

    async def rewind_turns(self, turns: int = 1) -> None:
        """Remove the last `turns` user messages and everything after the first of them."""
        await self.flush()
        places = [at for at, message in enumerate(self.chat.messages) if message["role"] == "user"]
        if not 1 <= turns <= len(places):
            raise InvalidRequest(f"the chat has {len(places)} user messages; {turns} cannot be removed", "turns")
        self.unanswered.clear()
        self.chat.cut(places[-turns])
        if self.chat.messages:
            self.is_dirty = True
        else:
            self.edit(self.base, [])

    async def truncate(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens`. A chat becomes plain text to continue from."""
        await self.flush()
        if not 0 <= num_tokens <= len(self.tokens):
            raise InvalidRequest(
                f"the context has {len(self.tokens)} tokens and cannot keep {num_tokens}", "num_tokens"
            )
        self.edit(num_tokens, [])
        self.chat = Chat(tools=self.chat.tools, template=self.chat.template)
        self.base = num_tokens

    async def mask(self, *ranges: tuple[int, int]) -> None:
        """Hide ranges of tokens (first, past the last) from all tokens that follow, instead of those hidden before;
        without ranges, show all tokens again. Hidden tokens keep their positions.

        KV computed under a mask is private: contexts that begin with the same tokens do not share it.
        """
        await self.flush()
        if any(not 0 <= first <= last <= len(self.tokens) for first, last in ranges):
            raise InvalidRequest(f"{ranges} are not among the {len(self.tokens)} tokens of the context", "ranges")
        self.hide(tuple((first, last) for first, last in ranges))

    # Across failures, runs and programs

    async def restore(self, timeout_s: float = 60.0) -> None:
        """After `EngineDead`: compute the same tokens again on a new sequence. Waits up to `timeout_s` seconds for the
        engine."""
        await context_store.restore(self, timeout_s)

    @classmethod
    async def restored(cls, snapshot: Snapshot, **options: Any) -> Context:
        """Create a context in the state of a snapshot. `options` as for `Context`; tools come from the snapshot."""
        snapshot.check(await own_model())
        ctx = cls(**options)
        await ctx.rewind(snapshot)
        return ctx

    async def save(self, name: str) -> None:
        """Store tokens, messages and the model's name durably under a name, readable by all programs of this tenant."""
        await context_store.save(name, await self.snapshot())

    @classmethod
    async def open(cls, name: str, **options: Any) -> Context:
        """Open a saved context. Raises `UnknownHandle` for an unknown name and `InvalidRequest` for a context of
        another model. KV that is still cached is reused, the rest is computed again."""
        return await cls.restored(await context_store.load(name), **options)

    def expect(self, kind: str, seconds: float | None = None) -> None:
        """Tell the engine what the program waits for before the context goes on; see `Sequence.expect`. A context says
        by itself that it waits for its tool calls."""
        self.check()
        self.sequence.expect(kind, seconds)

    def _give_up(self) -> None:
        self.drop()
