"""A run over a WebSocket: it carries messages both ways until the run ends or the client disconnects.

Each frame is one JSON object: `RunEvent` to the client, `RunCommand` from it. While a client reads slowly, the run's
messages accumulate in its listener, which ends with an error if they are too many. A disconnect does not end the run,
which was launched in the background to outlive its client.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import msgspec
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from weft.abi.errors import InvalidRequest, LimitExceeded, SlowListener, WeftError
from weft.programs.run.listeners import Listener
from weft.programs.run.runs import Run
from weft.server.limits import INLINE_DECODE_BYTES
from weft.server.record import record_in
from weft.server.run_events import card_of, encode_event, end_event, error_event, message_event
from weft.server.schemas.programs import RunCommand, RunEvent
from weft.server.state import Service
from weft.tokenizers.tokenizer import off_loop

CLOSE_DONE, CLOSE_POLICY = 1000, 1008
FRAME_BYTES, MOST_ESCAPED = 1024, 6
"""Of a frame around its message, and of a frame for each byte of a message in which all characters are escaped."""

_encode, _decode = msgspec.json.encode, msgspec.json.decode
_command = msgspec.json.Decoder(RunCommand)


class RunSocket:
    """The ASGI application of the route."""

    def __init__(self, service: Service, path: str):
        self._service = service
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a WebSocket. Raises `UnknownRun` before it is accepted."""
        record = record_in(scope)
        record.route, record.stream = self._path, True
        run = self._service.programs.history.find(record.tenant, scope["path_params"]["run"])
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        listener = run.messages()
        tasks = [
            asyncio.create_task(_tell(socket, run, listener)),
            asyncio.create_task(_hear(socket, run)),
        ]
        try:
            with self._service.interruptible(_cancelling(tasks[0])):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.close()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        await _close(socket, next((one for one in results if isinstance(one, Exception)), None))


def _cancelling(task: asyncio.Task[None]) -> Callable[[Exception], None]:
    def cancel(error: Exception) -> None:
        task.cancel()

    return cancel


async def _tell(socket: WebSocket, run: Run, listener: Listener) -> None:
    await _send(socket, RunEvent(type="run", run=card_of(run.record()), missed=listener.missed))
    async for message in listener:
        await _send(socket, message_event(message))
    await run.wait()
    await _send(socket, end_event(run))


async def _hear(socket: WebSocket, run: Run) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"], message.get("reason"))
        try:
            size = len(message.get("text") or message.get("bytes") or "")
            most = run.record().limits.message_bytes * MOST_ESCAPED + FRAME_BYTES
            if size > most:
                raise LimitExceeded(f"the frame has {size} bytes; there may be {most}", "message_bytes")
            read = functools.partial(_read, message)
            told = read() if size <= INLINE_DECODE_BYTES else await off_loop(read, tenant=run.tenant)
            if told is None:
                run.cancel()
            else:
                await run.deliver(told)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            await _send(socket, error_event(InvalidRequest(f"This is not a command: {error}.")))
        except WeftError as error:
            await _send(socket, error_event(error))


def _read(message: Message) -> bytes | None:
    """What a frame tells the run; None: it cancels it. All of it is decoded, so that no program gets invalid JSON."""
    command = _command.decode(_text_of(message))
    return None if command.type == "cancel" else _encode(_decode(command.message))


def _text_of(message: Message) -> str:
    """The text of a text or binary frame. Raises `UnicodeDecodeError`."""
    text, data = message.get("text"), message.get("bytes")
    return text if isinstance(text, str) else bytes(data or b"").decode()


async def _send(socket: WebSocket, event: RunEvent) -> None:
    await socket.send_text(encode_event(event).decode())


async def _close(socket: WebSocket, failure: Exception | None) -> None:
    """Close the WebSocket, unless the client has disconnected."""
    if socket.client_state is WebSocketState.DISCONNECTED or socket.application_state is WebSocketState.DISCONNECTED:
        return
    if isinstance(failure, WebSocketDisconnect):
        return
    if isinstance(failure, SlowListener):
        await socket.close(CLOSE_POLICY, failure.message[:100])
    elif failure is not None:
        raise failure
    else:
        await socket.close(CLOSE_DONE)
