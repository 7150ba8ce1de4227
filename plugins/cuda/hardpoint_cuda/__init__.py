"""Hardpoint on NVIDIA GPUs."""
