"""The engine: the loop that joins scheduler, worker, stop strings and clients; in process, or a process itself."""
