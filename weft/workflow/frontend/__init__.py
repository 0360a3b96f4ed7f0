"""What users write: flows, which are functions that are traced once, and their operators."""

from weft.workflow.frontend import ops

__all__ = ["ops"]
