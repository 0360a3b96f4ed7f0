"""Layers that families share. Each one defines its weights: names, shapes and sources."""
