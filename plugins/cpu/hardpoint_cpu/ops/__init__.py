"""Op providers of the processor, one file per op family."""
