"""The simulator: the scheduler and the cache of an engine on virtual time, over a worker that only takes time.

Pure: numpy and the layers below; time and seeds are arguments. `weft sim` is its command line.
"""
