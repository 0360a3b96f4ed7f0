"""The bottom layer: values, errors, wire structs and protocols that every other layer shares. No I/O, no torch."""
