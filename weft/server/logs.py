"""The logs of a server: where they go, and how lines look. `weft.server.request_log` writes those of requests."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from weft.config import ServerConfig


class TextFormatter(logging.Formatter):
    """Formats a record as `time LEVEL logger: message key=value …`; only tracebacks take further lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line = super().format(record)
        fields = getattr(record, "weft", None)
        return line if not fields else line + "".join(f" {name}={_plain(value)}" for name, value in fields.items())


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "weft", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _plain(value: Any) -> str:
    text = str(value)
    return repr(text) if not text.isprintable() or " " in text or "=" in text else text


def _not_of_a_socket(record: logging.LogRecord) -> bool:
    """Drop uvicorn's lines about WebSockets, which contain the URL with its key. Weft logs its own line for each."""
    return not (record.name.startswith("uvicorn") and '"WebSocket' in str(record.msg))


def configure_logging(config: ServerConfig) -> None:
    """Send the logs of Weft and of uvicorn to standard error, in the configured form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if config.log_format == "json"
        else TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    handler.addFilter(_not_of_a_socket)
    for name in ("weft", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(config.log_level.upper())
        log.propagate = False
    # uvicorn's line per request would repeat Weft's without the id.
    logging.getLogger("uvicorn.access").disabled = True
