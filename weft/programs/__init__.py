"""Programs: user code that decides what sequences do next. Completion and embedding are programs too, in `builtin/`."""
