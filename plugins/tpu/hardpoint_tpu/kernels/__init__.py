"""Pallas kernels: functions of JAX arrays, without PyTorch."""
