"""Programs: user code that decides what sequences do next. Chat and completion are programs too, in `builtin/`."""
