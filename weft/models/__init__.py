"""Model families, their layers, and the loading of their checkpoints."""
