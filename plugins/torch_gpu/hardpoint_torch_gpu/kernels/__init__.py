"""Kernels in Triton. Each file has the kernels of one kind of op and the function that launches them."""
