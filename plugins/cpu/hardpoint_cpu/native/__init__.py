"""Kernels of our own: the binding of the C library, its op providers, and the tape that replays a step."""
