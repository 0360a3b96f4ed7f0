"""Kernels for CPUs in C++: sources, their build, the binding, and the operations. Used when the library was built."""
