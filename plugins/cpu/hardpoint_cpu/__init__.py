"""Hardpoint on the processor. The entry point is `hardpoint_cpu.platform`."""
