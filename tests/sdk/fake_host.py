"""A host of programs in one process: it reads packed commands, carries them out in Python, and answers with packed
events, one turn of the event loop later. What the model writes is scripted, or follows from `fake_model`."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tests.sdk import fake_model as model
from tests.sdk.fake_space import Pages
from weft.abi.frames import CommandFrame, EventKind, commands, pack_event
from weft.abi.operations import Op
from weft.sdk import channel as channels
from weft.sdk.answers import pack_ints, unpack_ints
from weft.sdk.channel import Channel

T = TypeVar("T")


class Fault(Exception):
    """Becomes an ERROR event."""

    def __init__(self, kind: str, message: str, param: str = ""):
        super().__init__(message)
        self.blobs = (kind.encode(), message.encode(), param.encode())


class FakeHost:
    """`replies`: what the model writes, one per generation, END-terminated unless cut; without one it is "ok"."""

    def __init__(self, *replies: str):
        self.replies = deque(replies)
        self.channel = Channel(self._flush)
        self.log: list[CommandFrame] = []
        """All commands."""
        self.faults: dict[Op, deque[Fault]] = {}
        self.info = dict(model.INFO)
        self.sequences: dict[int, list[int]] = {}
        self.sent: list[Any] = []
        self.inbox: deque[Any] = deque()
        self.store: dict[str, bytes] = {}
        self.web: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.programs: dict[str, Any] = {}
        """What children return: a value, or a Fault."""
        self.is_dead = False
        self.part_tokens = 3
        self._events: list[bytes] = []
        self._pending: dict[int, CommandFrame] = {}
        """Calls that answer later: RECEIVE, SUBSCRIBE, generations, endless sleeps."""
        self._children: dict[int, Any] = {}
        self._matchers: dict[int, list[int]] = {}
        self._pages = Pages()

    # ---- for tests

    def run(self, main: Callable[[], Awaitable[T]]) -> T:
        """Run a program to its end."""

        async def whole() -> T:
            token = channels.install(self.channel)
            try:
                return await asyncio.wait_for(main(), 10)
            finally:
                channels.uninstall(token)

        return asyncio.run(whole())

    def fail(self, op: Op, kind: str, message: str = "as told", param: str = "") -> None:
        """The next command of this kind fails."""
        self.faults.setdefault(op, deque()).append(Fault(kind, message, param))

    def ops(self, *wanted: Op) -> list[Op]:
        """Operations so far; of some kinds only, if any are named."""
        return [command.op for command in self.log if not wanted or command.op in wanted]

    def say(self, message: Any) -> None:
        """A message for the program."""
        self.inbox.append(message)
        self._deliver()

    def die(self) -> None:
        """The engine crashes: sequences are lost, and new ones fail until `is_dead` is false again."""
        self.is_dead = True
        self.sequences.clear()
        for call, command in list(self._pending.items()):
            if command.op is Op.SEQ_GENERATE:
                self._end(call, EventKind.ERROR, *Fault("engine_dead", "the engine crashed").blobs)

    def sync(self) -> None:
        """Carry out what the program said so far, now."""
        self._take()

    @property
    def num_pages(self) -> int:
        """Pages that are allocated."""
        return len(self._pages.pages)

    # ---- the wire

    def _flush(self) -> None:
        asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        for command in commands(self.channel.take()):
            self.log.append(command)
            try:
                faults = self.faults.get(command.op)
                if faults:
                    raise faults.popleft()
                result = self._carry_out(command)
            except Fault as fault:
                self._emit(EventKind.ERROR, command.call, *fault.blobs)
            else:
                if result is not None:
                    self._emit(EventKind.RESULT, command.call, *result)

    def _emit(self, kind: EventKind, call: int, *blobs: bytes) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._dispatch)
        self._events.append(pack_event(kind, call, *blobs))

    def _dispatch(self) -> None:
        events, self._events = self._events, []
        self.channel.dispatch(b"".join(events))

    def _end(self, call: int, kind: EventKind, *blobs: bytes) -> None:
        if self._pending.pop(call, None) is not None:
            self._emit(kind, call, *blobs)

    # ---- operations: each returns the blobs of its result, or None where there is none now

    def _carry_out(self, command: CommandFrame) -> tuple[bytes, ...] | None:
        carry_out = getattr(self, f"_{command.op.name.lower()}", None)
        if carry_out is None:
            return self._pages.carry_out(command, Fault)
        result = carry_out(command, *command.numbers, *command.blobs)
        assert result is None or isinstance(result, tuple)
        return result

    def _log(self, command: CommandFrame, level: int, text: bytes) -> None:
        pass

    def _send(self, command: CommandFrame, message: bytes) -> None:
        self.sent.append(json.loads(message))

    def _receive(self, command: CommandFrame) -> None:
        self._pending[command.call] = command
        self._deliver()

    def _deliver(self) -> None:
        waiting = [call for call, command in self._pending.items() if command.op is Op.RECEIVE]
        while waiting and self.inbox:
            self._end(waiting.pop(0), EventKind.RESULT, json.dumps(self.inbox.popleft()).encode())

    def _sleep(self, command: CommandFrame, seconds: float) -> tuple[bytes, ...] | None:
        if seconds < 1:
            return ()
        self._pending[command.call] = command
        return None

    def _models(self, command: CommandFrame) -> tuple[bytes, ...]:
        return (json.dumps([self.info, {"name": "other", "traits": ["Core"]}]).encode(),)

    def _cancel(self, command: CommandFrame, call: int) -> None:
        self._end(call, EventKind.ERROR, *Fault("cancelled", "the call was given up").blobs)

    def _http(self, command: CommandFrame, about: bytes, body: bytes) -> tuple[bytes, ...]:
        request = json.loads(about)
        if request["url"] not in self.web:
            raise Fault("network_denied", f"{request['url']} is not allowed")
        status, headers, answer = self.web[request["url"]]
        found = {"status": status, "headers": headers, "url": request["url"]}
        return json.dumps(found).encode(), answer or body

    def _broadcast(self, command: CommandFrame, topic: bytes, message: bytes) -> None:
        for call, waiting in self._pending.items():
            if waiting.op is Op.SUBSCRIBE and waiting.blobs[0] == topic:
                self._emit(EventKind.PART, call, topic, message)

    def _subscribe(self, command: CommandFrame, topic: bytes) -> None:
        self._pending[command.call] = command

    def _launch(self, command: CommandFrame, child: int, about: bytes) -> tuple[bytes, ...]:
        launched = json.loads(about)
        if launched["program"] not in self.programs and not launched["source"]:
            raise Fault("unknown_handle", f"there is no program {launched['program']}")
        self._children[child] = self.programs.get(launched["program"], launched["args"])
        return (json.dumps({"run": f"run-{child}"}).encode(),)

    def _join(self, command: CommandFrame, child: int) -> tuple[bytes, ...]:
        result = self._children[child]
        if isinstance(result, Fault):
            raise result
        return (json.dumps(result).encode(),)

    def _kill(self, command: CommandFrame, child: int) -> None:
        self._children[child] = Fault("cancelled", "the run was cancelled")

    def _tokenize(self, command: CommandFrame, special: int, text: bytes) -> tuple[bytes, ...]:
        return (pack_ints(model.encode(text.decode(), bool(special))),)

    def _detokenize(self, command: CommandFrame, skip: int, tokens: bytes) -> tuple[bytes, ...]:
        return (model.decode(unpack_ints(tokens), bool(skip)).encode(),)

    def _vocabulary(self, command: CommandFrame) -> tuple[bytes, ...]:
        tokens = [bytes([byte]) for byte in range(256)] + [name.encode() for name in model.SPECIAL]
        return struct.pack(f"<{len(tokens)}I", *map(len, tokens)), b"".join(tokens)

    def _render(self, command: CommandFrame, cue: int, messages: bytes, rest: bytes) -> tuple[bytes, ...]:
        chat, options = json.loads(messages), json.loads(rest)
        if any(message["role"] == "refused" for message in chat):
            raise Fault("invalid_request", "the chat template refused the messages: role", "messages")
        return (model.render(chat, bool(cue), options.get("tools")).encode(),)

    # ---- sequences

    def _find(self, number: int) -> list[int]:
        if self.is_dead:
            raise Fault("engine_dead", "the engine is down")
        if number not in self.sequences:
            raise Fault("engine_dead", "the sequence was lost")
        return self.sequences[number]

    def _seq_open(self, command: CommandFrame, number: int, priority: int) -> None:
        if self.is_dead:
            raise Fault("engine_dead", "the engine is down")
        self.sequences[number] = []

    def _seq_append(self, command: CommandFrame, number: int, tokens: bytes) -> None:
        self._find(number).extend(unpack_ints(tokens))

    def _seq_fork(self, command: CommandFrame, number: int, child: int) -> None:
        self.sequences[child] = list(self._find(number))

    def _seq_expect(self, command: CommandFrame, number: int, seconds: float, kind: bytes) -> None:
        self._find(number)

    def _seq_truncate(self, command: CommandFrame, number: int, keep: int) -> None:
        del self._find(number)[keep:]

    def _seq_release(self, command: CommandFrame, number: int) -> None:
        self.sequences.pop(number, None)

    def _seq_hold(self, command: CommandFrame, number: int, seconds: float) -> None:
        self.sequences.pop(number, None)

    def _seq_cancel(self, command: CommandFrame, number: int) -> None:
        for call, waiting in list(self._pending.items()):
            if waiting.op is Op.SEQ_GENERATE and waiting.numbers[0] == number:
                self._end(call, EventKind.ERROR, *Fault("cancelled", "the sequence was cancelled").blobs)

    def _seq_priority(self, command: CommandFrame, number: int, priority: int) -> None:
        self._find(number)

    def _seq_mask(self, command: CommandFrame, number: int, ranges: bytes) -> None:
        ends = unpack_ints(ranges)
        if any(not 0 <= end <= len(self._find(number)) for end in ends):
            raise Fault("invalid_request", f"{ends} are not among the tokens")

    def _seq_dist(self, command: CommandFrame, number: int, k: int, tokens: bytes) -> tuple[bytes, ...]:
        held = self._find(number)
        held += unpack_ints(tokens)
        best = model.top(held, k)
        return pack_ints(token for token, _ in best), struct.pack(f"<{k}f", *(value for _, value in best))

    def _seq_score(self, command: CommandFrame, number: int, k: int, tokens: bytes) -> tuple[bytes, ...]:
        held, chosen, ids, values = self._find(number), [], [], []
        for token in unpack_ints(tokens):
            best = model.top(held, k) if held else [(-1, 0.0)] * k
            chosen.append(model.distribution(held)[token] if held else float("nan"))
            ids += [found for found, _ in best]
            values += [value for _, value in best]
            held.append(token)
        return struct.pack(f"<{len(chosen)}f", *chosen), pack_ints(ids), struct.pack(f"<{len(values)}f", *values)

    def _seq_generate(self, command: CommandFrame, number: int, form: int, about: bytes) -> None:
        self._find(number)
        form &= 3
        options = json.loads(about)
        reply = self.replies.popleft() if self.replies else "ok"
        tokens = [*model.encode(reply), model.IM_END]
        stop = options["stop"]
        reason, ended_by, text = "stop", None, reply
        found = [(reply.find(word), word) for word in stop.get("stop", ()) if word in reply]
        if found:
            at, ended_by = min(found)
            text = reply[:at]
            tokens = model.encode(reply[: at + len(ended_by)])
        limit = stop.get("max_tokens")
        if limit is not None and limit < len(tokens):
            tokens, reason, ended_by = tokens[:limit], "length", None
            text = model.decode(tokens, form == 1)
        if form == 1:
            text = model.decode(model.encode(text))
        usage = {"num_prompt_tokens": len(self._find(number)), "num_output_tokens": len(tokens)}
        self._pending[command.call] = command
        ending = json.dumps({"reason": reason, "stop": ended_by, "usage": usage}).encode()
        logprobs = options["sampling"].get("logprobs")
        asyncio.get_running_loop().call_soon(
            self._write, command, deque(tokens), text if form else "", ending, logprobs
        )

    def _write(self, command: CommandFrame, tokens: deque[int], text: str, ending: bytes, logprobs: int | None) -> None:
        """One part of a generation, then the next one a turn later."""
        call, number = command.call, int(command.numbers[0])
        if call not in self._pending:
            return
        is_whole = int(command.numbers[1]) & 4
        part = [tokens.popleft() for _ in range(len(tokens) if is_whole else min(self.part_tokens, len(tokens)))]
        # Text comes as far as its tokens do.
        size = len(text) if not tokens else min(len(text), len(model.decode(part, False)))
        blobs = [pack_ints(part), text[:size].encode()]
        if logprobs is not None:
            blobs += _logprobs(self.sequences[number], part, logprobs)
        self.sequences[number] += part
        self._emit(EventKind.PART, call, *blobs)
        if tokens:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._write, command, tokens, text[size:], ending, logprobs)
        else:
            self._end(call, EventKind.RESULT, ending)

    # ---- store and grammars

    def _store_put(self, command: CommandFrame, name: bytes, value: bytes) -> tuple[bytes, ...]:
        self.store[name.decode()] = value
        return ()

    def _store_get(self, command: CommandFrame, name: bytes) -> tuple[bytes, ...]:
        value = self.store.get(name.decode())
        return (b"\0", b"") if value is None else (b"\1", value)

    def _store_delete(self, command: CommandFrame, name: bytes) -> tuple[bytes, ...]:
        self.store.pop(name.decode(), None)
        return ()

    def _store_list(self, command: CommandFrame, prefix: bytes) -> tuple[bytes, ...]:
        return (json.dumps(sorted(name for name in self.store if name.startswith(prefix.decode()))).encode(),)

    def _matcher_open(self, command: CommandFrame, number: int, grammar: bytes) -> tuple[bytes, ...]:
        """Understands one grammar: the regular expression of a word."""
        known = json.loads(grammar)
        if known["kind"] != "regex":
            raise Fault("invalid_request", "the grammar cannot be compiled", "grammar")
        self._matchers[number] = model.encode(known["text"])
        return ()

    def _matcher_push(self, command: CommandFrame, number: int, tokens: bytes) -> tuple[bytes, ...]:
        if number not in self._matchers:
            raise Fault("unknown_handle", f"there is no matcher {number}")
        rest = self._matchers[number]
        for token in unpack_ints(tokens):
            if not rest or rest.pop(0) != token:
                raise Fault("invalid_request", f"token {token} is not allowed here", "tokens")
        bits = 1 << (rest[0] if rest else model.IM_END)
        return bytes([not rest]), bits.to_bytes((model.VOCAB + 7) // 8, "little")

    def _matcher_close(self, command: CommandFrame, number: int) -> None:
        del self._matchers[number]


def _logprobs(held: list[int], part: list[int], k: int) -> list[bytes]:
    chosen, ids, values = [], [], []
    for at, token in enumerate(part):
        seen = [*held, *part[:at]]
        chosen.append(model.distribution(seen)[token])
        ids += [found for found, _ in model.top(seen, k)]
        values += [value for _, value in model.top(seen, k)]
    return [struct.pack(f"<{len(chosen)}f", *chosen), pack_ints(ids), struct.pack(f"<{len(values)}f", *values)]
