"""The engine: the loop that joins scheduler, worker, stop strings and clients, in process or as a process of its own."""
