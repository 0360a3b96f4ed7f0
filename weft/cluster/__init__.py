"""Several engines of one model: which of them a request goes to."""
