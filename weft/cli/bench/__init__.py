"""`weft bench`: how fast this machine runs a model, by the same paths that users take."""
