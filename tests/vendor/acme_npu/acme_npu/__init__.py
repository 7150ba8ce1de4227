"""The Acme NPU for Hardpoint. The entry point is `acme_npu.platform`."""
