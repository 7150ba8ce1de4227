"""Hardpoint on AMD GPUs."""
