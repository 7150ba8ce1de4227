"""One file per family of kernels."""
