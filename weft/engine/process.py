"""The engine process, run by `weft.children.entry`. Its configuration is one line of JSON on stdin.

It binds a zmq ROUTER socket, loads the model, reports the progress of loading to its clients, and runs the loop. It
ends when its stdin closes, and then removes the folder of the socket: the process that started it may have been killed.
`weft.engine.supervisor` starts and watches it.
"""

from __future__ import annotations

import logging
import sys
import time

import msgspec
import zmq

from weft.abi.errors import EngineDead, WeftError
from weft.children.entry import call_when_stdin_closes
from weft.children.progress import made_progress
from weft.core.wire import Command, Envelope, Event, Failed, Loading, decode_commands, encode_envelope
from weft.engine.launch import LaunchArgs
from weft.engine.loop import EngineLoop

EXIT_LOAD_FAILED = 3
_PROGRESS_EVERY_S = 0.1
_COARSE_S, _FINE_S = 0.002, 0.00003
"""The shortest wait that zmq is used for, and the pause between looks in shorter ones."""

_log = logging.getLogger("weft.engine")


class ZmqMailbox:
    """Clients are the peers of a ROUTER socket, numbered as they are first heard."""

    def __init__(self, address: str):
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._numbers: dict[bytes, int] = {}
        self._identities: dict[int, bytes] = {}
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether the loop should end."""
        return self._stopped

    def stop(self) -> None:
        """End the loop after the step under way."""
        self._stopped = True

    @property
    def clients(self) -> list[int]:
        """Numbers of all clients that have sent a message."""
        return list(self._identities)

    def receive(self, wait_s: float) -> list[tuple[int, list[Command]]]:
        """Messages that have come; waits up to `wait_s` seconds for the first. Called in every turn of the loop."""
        made_progress()
        if wait_s > 0 and not self._wait(wait_s):
            return []
        messages: list[tuple[int, list[Command]]] = []
        while True:
            try:
                identity, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            client = self._number(identity)
            try:
                messages.append((client, decode_commands(data)))
            except msgspec.MsgspecError as error:
                _log.error("client %d sent a message that cannot be read: %s", client, error)

    def _wait(self, wait_s: float) -> bool:
        """Whether a message has come. zmq waits for whole milliseconds; shorter waits poll."""
        if wait_s >= _COARSE_S:
            return bool(self._socket.poll(int(wait_s * 1000)))
        until = time.monotonic() + wait_s
        while not self._socket.poll(0):
            if time.monotonic() >= until:
                return False
            time.sleep(_FINE_S)
        return True

    def send(self, client: int, envelope: Envelope) -> None:
        """Send to a client; zmq drops messages to one that has disconnected."""
        self._socket.send_multipart((self._identities[client], encode_envelope(envelope)), zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued, then close."""
        self._socket.close()
        zmq.Context.instance().term()

    def _number(self, identity: bytes) -> int:
        number = self._numbers.get(identity)
        if number is None:
            number = self._numbers[identity] = len(self._numbers) + 1
            self._identities[number] = identity
        return number


class _Startup:
    """Reports the progress of loading to clients; keeps their messages for the loop."""

    def __init__(self, mailbox: ZmqMailbox):
        self._mailbox = mailbox
        self._sent_at = 0.0
        self.early: list[tuple[int, list[Command]]] = []

    def progress(self, done: int, total: int) -> None:
        self.early += self._mailbox.receive(0.0)
        now = time.monotonic()
        if done >= total or now - self._sent_at >= _PROGRESS_EVERY_S:
            self._sent_at = now
            self.tell(Loading(done, total))

    def tell(self, event: Event) -> None:
        for client in self._mailbox.clients:
            self._mailbox.send(client, Envelope(0, [event]))


class _Resumed:
    """A mailbox that first returns the messages that came while the engine was loading."""

    def __init__(self, mailbox: ZmqMailbox, early: list[tuple[int, list[Command]]]):
        self._mailbox = mailbox
        self._early = early

    @property
    def stopped(self) -> bool:
        return self._mailbox.stopped

    def receive(self, wait_s: float) -> list[tuple[int, list[Command]]]:
        early, self._early = self._early, []
        return early + self._mailbox.receive(0.0 if early else wait_s)

    def send(self, client: int, envelope: Envelope) -> None:
        self._mailbox.send(client, envelope)


def main(address: str) -> int:
    """Run an engine until told to stop; the exit status of the process."""
    args = msgspec.json.decode(sys.stdin.buffer.readline(), type=LaunchArgs)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    mailbox = ZmqMailbox(address)
    call_when_stdin_closes(mailbox.stop, address)
    startup = _Startup(mailbox)
    startup.early += mailbox.receive(10.0)  # the parent's Hello, so that it hears of progress
    try:
        from weft.engine.build import build_engine  # imports torch, which takes a second: clients can connect before

        engine = build_engine(args.config, mailbox.send, startup.progress, trace=args.trace)
    except Exception as error:
        if isinstance(error, WeftError):  # a user's mistake, which the process that started the engine reports
            known = error
        else:
            _log.exception("the engine could not start")
            known = EngineDead(f"the engine could not start: {error}")
        startup.early += mailbox.receive(0.1)
        startup.tell(Failed.of(0, known))
        mailbox.close()
        return EXIT_LOAD_FAILED
    try:
        EngineLoop(engine, _Resumed(mailbox, startup.early), args.config.lease_s).run()
    finally:
        engine.close()
    mailbox.close()
    return 0
