"""`make demo`: a tour of a running server."""
