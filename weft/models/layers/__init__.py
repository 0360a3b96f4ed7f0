"""The pieces that families share. Each one knows its own weights: their names, shapes and sources."""
