"""Triton kernels, captured graphs and transfers for GPUs that have a torch build."""
