"""`ErrorRecord`: an error as it crosses between processes and is kept with what failed."""

from __future__ import annotations

import msgspec

from weft.abi.errors import WeftError, from_kind

MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS, MAX_PARAM_CHARS = 4096, 16384, 256


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One error. Made by `of`, its texts are valid Unicode of bounded size, though a program may have written them."""

    kind: str
    """As `WeftError.kind`."""
    message: str
    param: str | None = None
    """The field or the limit at fault."""
    traceback: str = ""
    """Of a program's own lines."""
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: WeftError) -> ErrorRecord:
        """The record of an error."""
        return cls(
            kind=error.kind,
            message=shortened(error.message, MAX_MESSAGE_CHARS),
            param=None if error.param is None else shortened(error.param, MAX_PARAM_CHARS),
            traceback=shortened(error.traceback, MAX_TRACEBACK_CHARS),
            retry_after_s=error.retry_after_s,
        )

    def error(self) -> WeftError:
        """The exception that was recorded, with its traceback as text; of an unknown kind, a plain `WeftError`."""
        return from_kind(
            self.kind, self.message, param=self.param, retry_after_s=self.retry_after_s, traceback=self.traceback
        )


def shortened(text: str, most: int) -> str:
    """A text as valid Unicode of about `most` characters: the middle of a longer one is left out."""
    if len(text) > most:
        text = f"{text[: most // 2]} … ({len(text) - most} characters are left out) … {text[-(most // 2) :]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
