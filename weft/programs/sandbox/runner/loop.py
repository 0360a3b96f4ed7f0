"""An asyncio loop that waits by asking the host. Real asyncio on top: tasks, timeouts, queues."""

import asyncio

from weft.programs.sandbox.runner.stdlib_stubs import denied
from weft.programs.sandbox.runner.link import LINK


class HostLoop(asyncio.BaseEventLoop):
    """An asyncio loop that waits by asking the host."""

    def __init__(self):
        super().__init__()
        self._selector = self
        self._passes = 0

    def time(self):
        """The clock of the host, in seconds."""
        return LINK.now()

    def select(self, timeout):
        """Called once per pass: None waits without end, 0 says that something is ready to run."""
        if timeout == 0:
            # Nothing to say, and others ready to run: the host is asked now and then only.
            self._passes += 1
            if not LINK.channel._outbox and self._passes % 16:
                return ()
        data = LINK.exchange(-1.0 if timeout is None else timeout)
        if data:
            LINK.channel.dispatch(data)
        return ()

    def _run_once(self):
        """A pass. Those without timers, which are most, need little of what the base class does; and a program that
        asks for token after token makes one for each."""
        if self._scheduled:
            super()._run_once()
            return
        ready = self._ready
        self.select(0 if ready or self._stopping else None)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _process_events(self, events):
        pass

    def _write_to_self(self):
        pass


for _name in (
    *("run_in_executor", "getaddrinfo", "getnameinfo", "create_connection", "create_datagram_endpoint"),
    *("create_server", "create_unix_connection", "create_unix_server", "connect_accepted_socket", "sendfile"),
    *("start_tls", "connect_read_pipe", "connect_write_pipe", "subprocess_shell", "subprocess_exec", "add_reader"),
    *("add_writer", "sock_recv", "sock_sendall", "sock_connect", "sock_accept", "add_signal_handler"),
):
    setattr(HostLoop, _name, denied(f"asyncio's {_name}"))
