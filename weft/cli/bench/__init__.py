"""`weft bench`: measures the speed of a model on this machine, through the public interfaces."""
