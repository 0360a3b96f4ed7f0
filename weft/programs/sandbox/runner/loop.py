"""An asyncio loop that waits by asking the host. Real asyncio on top: tasks, timeouts, queues."""

import asyncio

from weft.programs.sandbox.runner.doors import denied
from weft.programs.sandbox.runner.link import LINK


class HostLoop(asyncio.BaseEventLoop):
    """An asyncio loop that waits by asking the host."""

    def __init__(self):
        super().__init__()
        self._selector = self
        self._passes = 0
        self._was_selected = False
        self._at = LINK.now()

    def time(self):
        """The clock is read when somebody needs it: right after `select` only where timers run."""
        if self._was_selected:
            self._was_selected = False
            if not self._scheduled:
                return self._at
        self._at = LINK.now()
        return self._at

    def select(self, timeout):
        """Called once per pass: None waits without end, 0 says that something is ready to run."""
        self._was_selected = True
        if timeout == 0:
            # Nothing to say, and others ready to run: the host is asked now and then only.
            self._passes += 1
            if not LINK.channel._outbox and self._passes % 16:
                return ()
        data = LINK.exchange(-1.0 if timeout is None else timeout)
        if data:
            LINK.channel.dispatch(data)
        return ()

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
