"""The way from the guest to its host: `exchange` and `now`, and the channel of the program that runs.

`LINK.host` is set before anything else is used: to the component's imports, or to a fake while the image is made.
"""


class Link:
    """The way out: bytes in characters, and the events that came while nobody could take them."""

    def __init__(self):
        self.host = None
        self.channel = None
        self._early = []
        self._last = 0.0

    def now(self):
        """Seconds since 1970; never goes back."""
        return self.host.now()

    def exchange(self, timeout):
        """Hand over what is queued; the events, of earlier exchanges too."""
        if self._early:
            timeout = 0.0
        data = self.host.exchange(self.channel.take().decode("latin-1"), timeout).encode("latin-1")
        if self._early:
            data = b"".join((*self._early, data))
            self._early.clear()
        return data

    def push(self, timeout=0.0):
        """Hand over what is queued, from within the program's own code: events are kept for the loop."""
        data = self.host.exchange(self.channel.take().decode("latin-1"), timeout)
        self._last = self.now()
        if data:
            self._early.append(data.encode("latin-1"))

    def push_sometimes(self):
        """Hand over what is queued unless that was done a moment ago."""
        if self.now() - self._last > 0.02:
            self.push()


LINK = Link()
