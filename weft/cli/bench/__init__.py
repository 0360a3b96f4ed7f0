"""`weft bench`."""
