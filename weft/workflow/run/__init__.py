"""Running a graph over rows: a state machine without I/O, and the loop that carries out what it asks for."""
