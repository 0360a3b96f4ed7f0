"""One module per kind of task."""
